#!/bin/bash
# Slurm's Prolog: `holter doctor` on the node, as the job's user, into the system's log. A prolog that fails drains its node and holds
# the job; that is done only if HOLTER_DRAIN=1 is set below, since a warning about settings is no reason to lose a node.
# Slurm gives no PATH.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
HOLTER=${HOLTER:-/opt/holter/bin/holter}
HOLTER_LOG=${HOLTER_LOG:-/var/log/slurm/holter-doctor.log}
HOLTER_DRAIN=${HOLTER_DRAIN:-0}

report=$(cd / && timeout 60 runuser -u "$SLURM_JOB_USER" -- "$HOLTER" doctor 2>&1)
code=$?
printf '%s job %s node %s: doctor ended with %s\n%s\n' "$(date -Is)" "$SLURM_JOB_ID" "$SLURMD_NODENAME" "$code" "$report" >> "$HOLTER_LOG"
[[ $HOLTER_DRAIN != 1 || $code -eq 0 ]]
