#!/bin/bash
# Slurm's Epilog: keeps what a job's run directory says (journal, incidents, halts), without checkpoints and without the tokens in
# coordinator.json. It is read as the job's user: root follows no links that a user has made. Never fails: that would drain the node.
# Slurm gives no PATH.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
HOLTER_ARCHIVE=${HOLTER_ARCHIVE:-/var/spool/slurm/holter}

run="holter-runs/slurm-$SLURM_JOB_ID"
if runuser -u "$SLURM_JOB_USER" -- test -d "$SLURM_JOB_WORK_DIR/$run"; then
    mkdir -p "$HOLTER_ARCHIVE"
    runuser -u "$SLURM_JOB_USER" -- tar -cz -C "$SLURM_JOB_WORK_DIR" --exclude=checkpoints --exclude=coordinator.json "$run" \
        > "$HOLTER_ARCHIVE/$SLURM_JOB_ID.$(date +%Y%m%dT%H%M%S).$SLURMD_NODENAME.tar.gz"
fi
exit 0
