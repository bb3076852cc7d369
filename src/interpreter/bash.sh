# The bridge of bash contexts: runs code in this shell and speaks PROTOCOL.md with the server on socket $1.
# Its names begin with __sbx_. Descriptor 200 is the socket; it is closed while code runs (the shell keeps a copy that
# what it starts does not get). Code is sourced at the top level, because `declare` in a function makes local variables.

exec 200<&"$1"
__sbx_fd=$1
exec {__sbx_fd}<&-
unset -v __sbx_source __sbx_fd
set --

# `return` in a trap leaves one function only. With extdebug, a DEBUG trap that gives 2 returns from the function or
# sourced file that the next command is in; so every level returns in turn.
__sbx_stop() {
    if ((BASH_SUBSHELL)); then exit "$1"; fi
    __sbx_stopped=$1
    set +e
    shopt -s extdebug
    set -T
    trap '__sbx_unwind' DEBUG
}

__sbx_unwind() {
    case ${FUNCNAME[1]-}:$BASH_COMMAND in
    __sbx_*:* | *:__sbx_*) return 0 ;;
    esac
    return 2
}

# `set -e` ends the execution and not the shell. The option is set again in the next execution.
__sbx_failed() {
    local status=$?
    [[ $- == *e* ]] || return "$status"
    ((BASH_SUBSHELL)) || __sbx_errexit=1
    __sbx_stop "$status"
}

__sbx_read() {
    IFS= builtin read -r -d '' -u 200 "$1" || exit 70
}

# Reads an execution and prepares its source on descriptor __sbx_fd. Interrupts are ignored until the code runs.
__sbx_next() {
    local count field name code stdin input prefix='exec {__sbx_fd}<&-; __sbx_fd=; '
    __sbx_restore=()
    __sbx_read count
    while ((count-- > 0)); do
        __sbx_read field
        name=${field%%=*}
        __sbx_restore+=("${!name+=}$name=${!name-}")
        builtin export "$field"
    done
    __sbx_read stdin
    __sbx_read code
    __sbx_stopped=
    [[ -n $(trap -p ERR) ]] || trap __sbx_failed ERR
    set -E
    if [[ -n $stdin ]]; then
        exec {input}< <(builtin printf %s "$stdin" 200<&-)
        prefix+="exec <&$input $input<&-; "
    fi
    # Until the trap is set the server sends no SIGINT. An interrupt that comes before the descriptor is closed skips that.
    exec {__sbx_up}>&200
    prefix+="trap '__sbx_stop 130' INT; builtin printf 'begun\n' >&$__sbx_up; exec {__sbx_up}>&-; __sbx_up=; "
    prefix+="${__sbx_errexit:+set -e; }${__sbx_trace:+set -$__sbx_trace; }"
    __sbx_errexit= __sbx_trace=
    # The second way changes $!, and is for machines where no temporary file can be made.
    { exec {__sbx_fd}<<<"$prefix$code"; } 2>/dev/null ||
        exec {__sbx_fd}< <(builtin printf %s "$prefix$code" 200<&-)
    __sbx_running=1
}

__sbx_finish() {
    local status=$1 word=done field
    trap '' INT
    __sbx_running=
    [[ $- != *x* ]] || __sbx_trace+=x
    [[ $- != *v* ]] || __sbx_trace+=v
    set +xv
    [[ -z ${__sbx_up-} ]] || exec {__sbx_up}>&-
    [[ -z ${__sbx_fd-} ]] || exec {__sbx_fd}<&-
    trap - DEBUG
    if [[ -n $__sbx_stopped ]]; then
        set +T
        shopt -u extdebug
        status=$__sbx_stopped
        [[ $__sbx_stopped == 130 && -z $__sbx_errexit ]] && word=int
    fi
    [[ $- == *e* ]] && __sbx_errexit=1
    set +e
    for field in ${__sbx_restore[@]+"${__sbx_restore[@]}"}; do
        if [[ $field == =* ]]; then builtin export "${field#=}"; else unset -v "${field%%=*}"; fi
    done
    builtin printf '%s %s\n' "$word" "$status" >&200
}

# `break` and `continue` of the code leave or continue this loop: then the loop that follows ends the execution. What the
# code has traced with `set -x` has nothing of the bridge.
__sbx_loop='while :; do
    { [[ -z $__sbx_running ]] || __sbx_finish 0; } 2>/dev/null
    __sbx_next
    . "/dev/fd/$__sbx_fd" 200<&- 0<&0
    { __sbx_finish "$?"; } 2>/dev/null
done
'
__sbx_loop+=$__sbx_loop$__sbx_loop$__sbx_loop
__sbx_loop+=$__sbx_loop'eval "$__sbx_loop"'
__sbx_errexit= __sbx_running= __sbx_trace=
trap '' INT
builtin printf 'ready %s\n' "$BASH_VERSION" >&200
eval "$__sbx_loop"
