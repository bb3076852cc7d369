# Given to `bash -c` with the descriptor of the bridge's socket: reads the bridge from it and runs it.
IFS= read -r -d '' -u "$1" __sbx_source || exit 70
eval "$__sbx_source"
