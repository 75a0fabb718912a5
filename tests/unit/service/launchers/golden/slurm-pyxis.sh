#!/bin/bash
#SBATCH --job-name=job-0123456789ab-a0003
#SBATCH --comment=ratchet-4e044227
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --gres=gpu:h100:2,nvme:1
#SBATCH --partition=gpu
#SBATCH --account=vision
#SBATCH --signal=USR1@140
#SBATCH --output=/shared/ratchet/jobs/job-0123456789ab/attempts/0003/engine.log
#SBATCH --open-mode=append
#SBATCH --export=ALL
#SBATCH --no-requeue

# sbatch reads no option after the first command.
export RATCHET_ATTEMPT_DIR=/shared/ratchet/jobs/job-0123456789ab/attempts/0003
# A signal to the job ends the agents first; the script waits for their results.
trap : TERM

# One agent per node. When one ends, the others end too.
srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task=1 --cpu-bind=none --mpi=none --export=ALL --label --kill-on-bad-exit=0 --wait=0 '--container-image=registry.example#team/worker:1' --container-mounts=/shared/ratchet:/shared/ratchet,/data:/mnt:ro \
  /bin/sh -c 'd=$1; shift; [ "$SLURM_PROCID" -eq 0 ] || d=$d/$(printf node-%05d "$SLURM_PROCID"); mkdir -p "$d" && exec "$@" >>"$d/agent.log" 2>&1' agent /shared/ratchet/jobs/job-0123456789ab/attempts/0003 \
  python -P -m ratchet_worker.agent /shared/ratchet/jobs/job-0123456789ab/attempts/0003/launch.json --node-from SLURM_PROCID
exit $?
