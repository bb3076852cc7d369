#!/bin/sh
# Drives a dedicated server with curl: a command, a background process, a file, a port.
#
#   export URL=http://127.0.0.1:49983   # where the server listens
#   export TOKEN=...                    # its SBX_TOKEN; scripts/run prints both lines
#   sh examples/curl.sh
set -eu
: "${URL:?set it to the address of the server}" "${TOKEN:?set it to the token of the server}"

# sbx PATH [CURL OPTION...]: one request. -N shows each event the moment it arrives.
sbx() {
    path=$1
    shift
    curl -sSN --fail-with-body -H "X-Sandbox-Token: $TOKEN" "$URL$path" "$@"
}

echo "# A command: its events arrive while it runs, and exit comes last."
sbx /v1/exec -d '{"cmd":"echo one; sleep 0.2; echo two >&2; exit 3"}'

echo "# A process in the background, its log, and its end."
sbx /v1/processes -d '{"cmd":"for n in 1 2 3; do echo tick $n; sleep 0.2; done","id":"ticker"}'
sbx '/v1/processes/ticker/logs?follow=1'
sbx /v1/processes/ticker -X DELETE

echo "# A file, written and read. Paths are relative to the server's working directory."
echo 'hello from curl' | sbx '/v1/files/write?path=site/hello.txt' -X PUT --data-binary @-
sbx '/v1/files/read?path=site/hello.txt'

echo "# A server inside, reached through the port proxy."
sbx /v1/processes -o /dev/null -d '{"cmd":["python3","-m","http.server","18181"],"cwd":"site","id":"web"}'
sbx '/v1/ports/18181/wait?timeout=30' -o /dev/null
sbx /v1/proxy/18181/hello.txt
sbx /v1/processes/web -X DELETE
sbx '/v1/files/delete?path=site&recursive=1' -X DELETE
