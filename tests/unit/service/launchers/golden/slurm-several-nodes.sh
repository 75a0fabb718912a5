#!/bin/bash
#SBATCH --job-name=job-0123456789ab-a0003
#SBATCH --comment=ratchet-4e044227
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=48
#SBATCH --mem=491520M
#SBATCH --gres=gpu:a100:8
#SBATCH --partition=large
#SBATCH --account=vision
#SBATCH --qos=night
#SBATCH --constraint="ib&hbm"
#SBATCH --reservation=maint
#SBATCH --time=720
#SBATCH --signal=USR1@140
#SBATCH --output=/shared/ratchet/jobs/job-0123456789ab/attempts/0003/engine.log
#SBATCH --open-mode=append
#SBATCH --export=ALL
#SBATCH --exclusive
#SBATCH --no-requeue
#SBATCH --nodelist=n[1-4]
#SBATCH --mail-user="me \"x\" \\ $HOME"
#SBATCH --contiguous

# sbatch reads no option after the first command.
export RATCHET_ATTEMPT_DIR=/shared/ratchet/jobs/job-0123456789ab/attempts/0003
# A signal to the job ends the agents first; the script waits for their results.
trap : TERM

set -e
module load cuda/12.8
ulimit -n 65536
set +e

# One agent per node. When one ends, the others end too.
srun --nodes=4 --ntasks=4 --ntasks-per-node=1 --cpus-per-task=48 --cpu-bind=none --mpi=none --export=ALL --label --kill-on-bad-exit=0 --wait=0 \
  /bin/sh -c 'd=$1; shift; [ "$SLURM_PROCID" -eq 0 ] || d=$d/$(printf node-%05d "$SLURM_PROCID"); mkdir -p "$d" && exec "$@" >>"$d/agent.log" 2>&1' agent /shared/ratchet/jobs/job-0123456789ab/attempts/0003 \
  /shared/venv/bin/python -P -m ratchet_worker.agent /shared/ratchet/jobs/job-0123456789ab/attempts/0003/launch.json --node-from SLURM_PROCID
exit $?
