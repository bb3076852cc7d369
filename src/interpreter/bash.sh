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

# A variable that is not set ends the shell under `set -u`, as does `${name:?}`: the status is 127 and nothing runs any more.
# With `set -e` any such error ends it, with other statuses and where it is. The EXIT trap saves the context from that. It
# runs only once in the life of a shell, so another bash takes the place of this one, in the same process, and gets what it
# holds; of jobs it knows nothing. What the code has set for EXIT is in __sbx_bye. (`exit 127` at the top level is taken
# for such an error too.)
__sbx_rescue() {
    __sbx_status=$?
    if [[ -z $__sbx_running ]]; then
        return "$__sbx_status"
    elif [[ $- == *e* && $__sbx_status != 0 && $BASH_COMMAND != *'"$__sbx_s'* ]]; then
        set +e
        __sbx_errexit=1
        # See __sbx_start. A copy of one that is closed on exec is too, but not that of 0.
        exec 0<&208 200<&0 0<&205 1>&206 2>&207
    elif [[ $__sbx_status != 127 || ${#FUNCNAME[@]} != 1 ]]; then
        return "$__sbx_status"
    fi
    __sbx_traps=$(trap -p) # a process substitution has none
    trap - ERR
    unset -v __sbx_from
    __sbx_stopped=1
    __sbx_finish 1 ''
    exec {__sbx_fd}< <(
        exec 200>&- 2>/dev/null
        shopt -p
        declare -f
        declare -F
        if ((${#FUNCNAME[@]} > 2)); then __sbx_globals; else declare -p; fi
        alias -p
        umask -p
        set +o
        builtin printf '%s\nset --' "$__sbx_traps"
        (($# == 0)) || builtin printf ' %q' "$@"
    ) || return
    trap - INT # what a shell ignores at its start it cannot trap
    BASH_ENV='' exec "$BASH" -c 'unset -v BASH_ENV
        trap "" INT
        __sbx_from=$1
        . "/dev/fd/$1" >/dev/null 2>&1
        exec {__sbx_from}<&-
        __sbx_guard "$(trap -p ERR)"
        eval "$__sbx_start"' bash "$__sbx_fd"
}

# Prints the variables as they are outside of all functions: `unset` uncovers what a local variable of a caller hides.
__sbx_globals() {
    declare -p ${!__sbx_*}
    __sbx_levels=("${FUNCNAME[@]}")
    for __sbx_name in $(compgen -v); do
        case $__sbx_name in BASH_[!EX]* | BASHPID | FUNCNAME | EPOCH* | *RANDOM | LINENO | __sbx_*) continue ;; esac
        __sbx_text=
        for __sbx_from in "${__sbx_levels[@]}"; do
            __sbx_from=$(declare -p "$__sbx_name") || break
            __sbx_text=$__sbx_from
            unset -v "$__sbx_name" || break
        done
        builtin printf '%s\n' "$__sbx_text"
    done
}

__sbx_guard() {
    trap '__sbx_rescue "$@" && :; eval "$__sbx_bye"' EXIT # no error itself, and keeps $?
    __sbx_mine=
    [[ ${1-} == *"trap -- "* && $1 != *__sbx_failed* ]] || trap "${__sbx_mine:=__sbx_failed}" ERR
    set -E
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
    if [[ -n $stdin ]]; then
        exec {input}< <(builtin printf %s "$stdin" 200<&-)
        prefix+="exec <&$input $input<&-; "
    fi
    # Until the trap is set the server sends no SIGINT. An interrupt that comes before the descriptor is closed skips that.
    exec {__sbx_up}>&200
    prefix+="trap '__sbx_stop 130' INT; builtin printf 'begun\n' >&$__sbx_up; exec {__sbx_up}>&-; __sbx_up=; "
    prefix+="${__sbx_errexit:+set -e; }"
    # A DEBUG trap fires for commands of the ERR trap too, which only `set -e` needs.
    if [[ -n $__sbx_debug || $code == *DEBUG* ]] && [[ $__sbx_errexit != 1 && $code != *set*-*e* && $code != *errexit* ]]; then
        [[ -z $__sbx_mine ]] || trap - ERR
    fi
    # It is the last, and does not fire for what is named as the bridge.
    [[ -z $__sbx_debug ]] || prefix+="trap -- '$__sbx_filter$__sbx_debug"$'\n'"$__sbx_end' DEBUG; "
    prefix+="${__sbx_trace:+__sbx_= set -$__sbx_trace; }"
    __sbx_errexit= __sbx_trace=
    # The second way changes $!, and is for machines where no temporary file can be made.
    { exec {__sbx_fd}<<<"$prefix$code"; } 2>/dev/null ||
        exec {__sbx_fd}< <(builtin printf %s "$prefix$code" 200<&-)
    __sbx_running=1
}

__sbx_finish() {
    [[ -n $__sbx_running ]] || return 0
    local status=$1 traps=$2 word=done field
    trap '' INT
    __sbx_running=
    [[ $- != *x* ]] || __sbx_trace+=x
    [[ $- != *v* ]] || __sbx_trace+=v
    set +xv
    [[ -z ${__sbx_up-} ]] || exec {__sbx_up}>&-
    [[ -z ${__sbx_fd-} ]] || exec {__sbx_fd}<&-
    if [[ -n $__sbx_stopped ]]; then
        trap - DEBUG
        set +T
        shopt -u extdebug # and what it has set
        set -E
        status=$__sbx_stopped
        [[ $__sbx_stopped == 130 && -z $__sbx_errexit ]] && word=int
    else
        __sbx_keep "$traps"
    fi
    [[ $- == *e* ]] && __sbx_errexit=1
    set +e
    for field in ${__sbx_restore[@]+"${__sbx_restore[@]}"}; do
        if [[ $field == =* ]]; then builtin export "${field#=}"; else unset -v "${field%%=*}"; fi
    done
    builtin printf '%s %s\n' "$word" "$status" >&200
}

__sbx_others() {
    builtin printf '\1'
    trap -p ERR
    builtin printf '\1'
    trap -p EXIT
}

# Keeps the traps that the code has set, as `trap -p` shows them, for the next execution: its DEBUG trap must not fire for the
# bridge, and its EXIT trap is run by the bridge's. A function does not see a DEBUG trap and cannot remove it, but another
# that it sets replaces it.
__sbx_keep() {
    local debug=${1%%$'\1'*} error=${1#*$'\1'} bye
    bye=${error#*$'\1'} error=${error%%$'\1'*}
    [[ -z $debug ]] || trap "$__sbx_none" DEBUG
    # With `set -T` the trap has printed before its text.
    debug=${debug#*"trap -- '"} debug=${debug%"' DEBUG"*}
    debug=${debug#"$__sbx_filter"} debug=${debug%$'\n'"$__sbx_end"}
    __sbx_debug=${debug#"$__sbx_none"}
    if [[ $bye != *'__sbx_rescue "$@" && :; eval'* ]]; then
        [[ $bye == *"trap -- "* ]] || bye="trap -- '' EXIT"
        bye=${bye#*trap -- } bye=${bye%EXIT*}
        eval "__sbx_bye=$bye"
    fi
    __sbx_guard "$error"
}

# `break` and `continue` of the code leave or continue this loop: then the loop that follows ends the execution. What the
# code traces with `set -x`, or prints in a DEBUG trap, has nothing of the bridge.
__sbx_loop='while { __sbx_finish "$?" "$(__sbx_= trap -p DEBUG; __sbx_others)"; } >/dev/null 2>&1; do
    __sbx_next
    . "/dev/fd/$__sbx_fd" 200<&- 0<&0
done
'
__sbx_loop+=$__sbx_loop$__sbx_loop$__sbx_loop
__sbx_loop+=$__sbx_loop'eval "$__sbx_loop"'
__sbx_errexit= __sbx_running= __sbx_trace= __sbx_debug= __sbx_bye= __sbx_none=': __sbx'
__sbx_filter='case ${FUNCNAME-}:$BASH_COMMAND in __sbx_*:* | *:__sbx_*) ;; *) ' __sbx_end=';; esac'
trap '' INT
__sbx_guard
builtin printf 'ready %s\n' "$BASH_VERSION" >&200
# The redirections give the shell copies, 205 to 208, that what it starts does not get.
__sbx_start='exec 201<&0 202>&1 203>&2 204<&200
{
    exec 201<&- 202>&- 203>&- 204<&-
    eval "$__sbx_loop"
} 0<&201 1>&202 2>&203 200<&204'
eval "$__sbx_start"
