# Sourced by the batch scripts here. One run directory serves a job and all its requeues.
export HOLTER_RUN_DIR="${HOLTER_RUN_DIR:-$PWD/holter-runs/slurm-$SLURM_JOB_ID}"
_limit="time limit of Slurm job $SLURM_JOB_ID"
# It may come at once: without a trap it would end the script.
_is_limit_near=""
trap '_is_limit_near=1' USR1

# Whether the halt that stands is the one that we asked for, with nothing against its checkpoint: the only one that is lifted without a person.
_is_halted_for_limit() {
    local halt="$HOLTER_RUN_DIR/halt.json"
    grep -qs '"cause": *"requested"' "$halt" && grep -q "$_limit" "$halt" && grep -q '"verdict": *"healthy"' "$halt"
}

# Prints the checkpoint to go on from; nothing at a first start, or while a halt stands that a person has to look at.
holter_checkpoint() {
    if _is_halted_for_limit; then
        holter resume "$HOLTER_RUN_DIR" >&2
    fi
    if [[ -d "$HOLTER_RUN_DIR" && ! -e "$HOLTER_RUN_DIR/halt.json" ]]; then
        holter checkpoint newest "$HOLTER_RUN_DIR" 2> /dev/null
    fi
}

# Slurm ends this script while it requeues the job: that takes a moment.
_requeue() {
    scontrol requeue "$SLURM_JOB_ID" && sleep 60
}

# Asks process $1's run for a halt, again until somebody hears it: a job that has just begun has no coordinator yet.
_ask_for_halt() {
    local told
    until told=$(holter halt "$HOLTER_RUN_DIR" --no-wait --reason "$_limit" 2>&1) || ! kill -0 "$1" 2> /dev/null; do sleep 1; done
    echo "$told" >&2
}

# Runs a command to its end. USR1 (#SBATCH --signal=B:USR1@SECONDS) becomes a halt at an agreed step; the job is then queued again and goes on.
# After a crash too, HOLTER_CRASHES (3) times in all. Any other halt ends with 93, and is nobody's to start again but a person's.
holter_run() {
    local code=0 crashes="$HOLTER_RUN_DIR/crashes" command=""
    # The signal may come before the command has a number.
    trap 'if [[ -n $command ]]; then _ask_for_halt "$command" & else _is_limit_near=1; fi' USR1
    "$@" &
    command=$!
    if [[ -n $_is_limit_near ]]; then _ask_for_halt "$command" & fi
    # A signal ends `wait`, not the command.
    while wait "$command"; kill -0 "$command" 2> /dev/null; do :; done
    wait "$command"
    code=$?
    trap - USR1
    if [[ $code -eq 93 ]]; then
        if _is_halted_for_limit; then _requeue; fi
    elif [[ $code -ne 0 ]]; then
        mkdir -p "$HOLTER_RUN_DIR" && echo "$code" >> "$crashes"
        if [[ $(wc -l < "$crashes") -le ${HOLTER_CRASHES:-3} ]]; then _requeue; fi
    fi
    return $code
}
