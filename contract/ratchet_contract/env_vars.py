"""The names of Ratchet's environment variables, and of torchrun's variables that the agent sets for ranks."""

from __future__ import annotations

from typing import Final

# read by client and service
HOME: Final = "RATCHET_HOME"  # the run directory; default ./.ratchet
SERVER: Final = "RATCHET_SERVER"  # base URL; default: from $RATCHET_HOME/service.json
TOKEN: Final = "RATCHET_TOKEN"  # bearer token sent to the service
CONFIG: Final = "RATCHET_CONFIG"  # the client's configuration file; default: ratchet/config.json below XDG_CONFIG_HOME
CA_FILE: Final = (
    "RATCHET_CA_FILE"  # PEM of the certificate authorities that the service's certificate is checked against
)
AUTH: Final = "RATCHET_AUTH"  # the service's --auth, and so on
TLS_CERT: Final = "RATCHET_TLS_CERT"
TLS_KEY: Final = "RATCHET_TLS_KEY"
CODE_ROOTS: Final = "RATCHET_CODE_ROOTS"  # separated by :
URI_ROOTS: Final = "RATCHET_CHECKPOINT_URI_ROOTS"  # separated by spaces
WEBHOOK_NETWORKS: Final = "RATCHET_WEBHOOK_NETWORKS"  # separated by spaces
TRACKER_TENSORBOARD_DIR: Final = "RATCHET_TRACKER_TENSORBOARD_DIR"  # the service's --tensorboard-dir, and so on
TRACKER_MLFLOW_URI: Final = "RATCHET_TRACKER_MLFLOW_URI"
TRACKER_WANDB_DIR: Final = "RATCHET_TRACKER_WANDB_DIR"
TRACKER_WANDB_MODE: Final = "RATCHET_TRACKER_WANDB_MODE"
DATABASE_URL: Final = "RATCHET_DATABASE_URL"
RUN_AS: Final = "RATCHET_RUN_AS"  # the user that users' code runs as: USER[:GROUP]
RUN_AS_LIMITS: Final = "RATCHET_RUN_AS_LIMITS"  # resource limits of that user: processes=NUMBER,file_size=SIZE
LAUNCHERS: Final = "RATCHET_LAUNCHERS"  # the service's launchers file
STANDBY: Final = "RATCHET_STANDBY"  # bounds of the local launcher's parked agents, or off
BOUNDS: Final = "RATCHET_BOUNDS"  # limits of what a service keeps of jobs' output: NAME=NUMBER,...
LOG_FORMAT: Final = "RATCHET_LOG_FORMAT"  # format of the service's log: text or json

# set by `ratchet run` for its service, which passes it to its agents
ENDS_WITH: Final = "RATCHET_ENDS_WITH"  # pid and start time of the process that they end with

# set by the agent for every rank
LAUNCH_FILE: Final = "RATCHET_LAUNCH_FILE"  # absolute path of launch.json
JOB_ID: Final = "RATCHET_JOB_ID"
ATTEMPT: Final = "RATCHET_ATTEMPT"  # its number
ATTEMPT_DIR: Final = "RATCHET_ATTEMPT_DIR"  # of all nodes
NODE_DIR: Final = "RATCHET_NODE_DIR"  # of this node's agent; for node 0 the same directory
CODE_DIGEST: Final = "RATCHET_CODE_DIGEST"  # current digest of code that is on the nodes
ENVIRONMENT_DIGEST: Final = (
    "RATCHET_ENVIRONMENT_DIGEST"  # of the environment that was built for the spec's requirements
)
AGENT_PID: Final = "RATCHET_AGENT_PID"
TENSORBOARD_DIR: Final = "RATCHET_TENSORBOARD_DIR"  # the same for all attempts, in the job's working directory
COPIES_FILE: Final = "RATCHET_COPIES_FILE"  # the agent's file of copies in memory; unset: the job has none
STORE_FD: Final = "RATCHET_STORE_FD"  # rank 0 only: inherited fd of the bound listening socket for the TCPStore

# of experiment trackers, set for every rank unless the spec's env or secrets set them
WANDB_RUN_ID: Final = "WANDB_RUN_ID"
WANDB_RESUME: Final = "WANDB_RESUME"
MLFLOW_RUN_ID: Final = "MLFLOW_RUN_ID"
MLFLOW_TRACKING_URI: Final = "MLFLOW_TRACKING_URI"  # read: without it there is no MLFLOW_RUN_ID

# set by a launcher for the agent
NODE_ADDRESS: Final = (
    "RATCHET_NODE_ADDRESS"  # address at which the other nodes reach this one, if the launcher knows it
)
NODE_NAME: Final = "RATCHET_NODE_NAME"  # the engine's name of the node; unset: Slurm's, or the name of the host

# set by the agent for the process that it forks ranks from
FORK_PLANS_FD: Final = "RATCHET_FORK_PLANS_FD"  # inherited fd of the ranks' plans, JSON
FORK_REPORT_FD: Final = "RATCHET_FORK_REPORT_FD"  # inherited fd of the pipe that reports their pids

# set for an agent, and for its fork server, that are started before there is an attempt
PARKED: Final = (
    "RATCHET_PARKED"  # a long value, over which /proc then shows the attempt's variables; for a server: the agent's pid
)
# set by a launcher that parks agents, for the agent, which passes it to its ranks
START: Final = "RATCHET_START"  # "parked", or "cold: " and why

# torchrun's names, set as torchrun sets them
RANK: Final = "RANK"
LOCAL_RANK: Final = "LOCAL_RANK"
WORLD_SIZE: Final = "WORLD_SIZE"
LOCAL_WORLD_SIZE: Final = "LOCAL_WORLD_SIZE"
GROUP_RANK: Final = "GROUP_RANK"
GROUP_WORLD_SIZE: Final = "GROUP_WORLD_SIZE"
ROLE_RANK: Final = "ROLE_RANK"
ROLE_WORLD_SIZE: Final = "ROLE_WORLD_SIZE"
ROLE_NAME: Final = "ROLE_NAME"
MASTER_ADDR: Final = "MASTER_ADDR"
MASTER_PORT: Final = "MASTER_PORT"
TORCHELASTIC_RUN_ID: Final = "TORCHELASTIC_RUN_ID"
TORCHELASTIC_RESTART_COUNT: Final = "TORCHELASTIC_RESTART_COUNT"
TORCHELASTIC_MAX_RESTARTS: Final = "TORCHELASTIC_MAX_RESTARTS"
TORCHELASTIC_USE_AGENT_STORE: Final = "TORCHELASTIC_USE_AGENT_STORE"

# Names that a spec's env or secrets may not set: the agent owns them.
RESERVED_PREFIXES: Final = ("RATCHET_", "TORCHELASTIC_")
RESERVED_NAMES: Final = frozenset(
    {
        RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE, ROLE_RANK, ROLE_WORLD_SIZE, ROLE_NAME,
        MASTER_ADDR, MASTER_PORT, "CUDA_VISIBLE_DEVICES",
    }
)  # fmt: skip
SET_AFTER_FORK: Final = frozenset(
    {RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE, ROLE_RANK, ROLE_WORLD_SIZE, ROLE_NAME,
     MASTER_ADDR, MASTER_PORT, WANDB_RUN_ID, "CUDA_VISIBLE_DEVICES"}
)  # fmt: skip
"""Variables that a rank of a parked fork server gets only after it is forked, like those with a reserved prefix."""
