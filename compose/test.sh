#!/bin/sh
# `make test-compose`: builds the image and tries the stack in an engine of its own. Needs root on Debian or Ubuntu.
#   TEST_DIR=/some/folder  keeps base image and layers there for the next run (4 GB); else all is removed
set -eu
cd "$(dirname "$0")/.."
keep=${TEST_DIR:+yes}
dir=${TEST_DIR:-$(mktemp -d /var/tmp/blockyard-compose.XXXXXX)}
mkdir -p "$dir"
passed=0 failed=0 pids="" forward=""
export DOCKER_HOST="unix://$dir/docker.sock" DOCKER_BUILDKIT=1 COMPOSE_PROJECT_NAME=blockyard-test
export STACK_IMAGE=blockyard STACK_KEYS="$dir/keys" STACK_LOG_LEVEL=info BASE_IMAGE=blockyard-base

docker() { if [ -x /usr/bin/docker ]; then /usr/bin/docker "$@"; else command docker "$@"; fi; }
compose() { docker-compose -f compose/docker-compose.yml "$@"; }
say() { echo "--- $*"; }

check() { # NAME COMMAND...: counts one test
    name=$1; shift
    if "$@"; then passed=$((passed + 1)); echo "ok      $name"; else failed=$((failed + 1)); echo "FAILED  $name"; fi
}

within() { # SECONDS COMMAND...: true as soon as the command is
    limit=$(($(date +%s) + $1)); shift
    until "$@"; do [ "$(date +%s)" -lt "$limit" ] || return 1; sleep 1; done
}

clean_up() {
    code=$?
    trap - EXIT INT TERM
    compose down -v --remove-orphans >/dev/null 2>&1 || true
    for pid in $pids; do kill "$pid" 2>/dev/null && while kill -0 "$pid" 2>/dev/null; do sleep 0.2; done; done
    # shellcheck disable=SC2086
    [ -z "$forward" ] || iptables $forward
    if [ -n "$keep" ]; then rm -rf "$dir/keys" "$dir/strangers"; else rm -rf --one-file-system "$dir"; fi
    [ $code -eq 0 ] || failed=$((failed + 1))
    echo "$passed passed, $failed failed"
    [ $failed -eq 0 ] && exit 0
    exit 1
}
trap clean_up EXIT
trap 'exit 130' INT TERM

install_engine() {
    missing=""
    for pair in dockerd:docker.io docker-compose:docker-compose debootstrap:debootstrap curl:curl; do
        command -v "${pair%%:*}" >/dev/null || missing="$missing ${pair#*:}"
    done
    [ -z "$missing" ] && return
    say "installing$missing"
    apt-get update -qq
    # shellcheck disable=SC2086
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >"$dir/apt.log" 2>&1
}

start_engine() {
    forward=$(iptables -S FORWARD | head -n 1) # an engine sets the policy to DROP for as long as the machine runs
    dockerd --host "$DOCKER_HOST" --data-root "$dir/data" --exec-root "$dir/exec" --pidfile "$dir/docker.pid" \
        --bridge none >"$dir/dockerd.log" 2>&1 &
    pids="$pids $!"
    within 60 docker info >/dev/null 2>&1 || { tail -20 "$dir/dockerd.log"; return 1; }
}

make_base_image() {
    docker image inspect "$BASE_IMAGE" >/dev/null 2>&1 && return
    say "base image"
    debootstrap --variant=minbase --include=python3,python3-venv,python3-pip,ca-certificates,libgomp1 \
        bookworm "$dir/root" >"$dir/debootstrap.log"
    tar -C "$dir/root" -c . | docker import - "$BASE_IMAGE" >/dev/null
    rm -rf --one-file-system "$dir/root"
}

build_image() { # pip in the build reaches what pip on this machine reaches
    say "image"
    rm -rf "$dir/served"
    mkdir "$dir/served"
    python3 -u -m http.server 0 --bind 127.0.0.1 --directory "$dir/served" >"$dir/http.log" 2>&1 &
    server=$!
    pids="$server $pids"
    within 20 grep -q port "$dir/http.log"
    url=http://127.0.0.1:$(sed -n 's/.* port \([0-9]*\) .*/\1/p' "$dir/http.log")
    python3 compose/host_pip.py "$dir/served" "$url" >"$dir/pip.conf"
    docker build --quiet --network host --build-arg BASE_IMAGE \
        --build-arg http_proxy --build-arg https_proxy --build-arg no_proxy \
        --secret id=pip,src="$dir/pip.conf" --secret id=ca,src="${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}" \
        --tag "$STACK_IMAGE" --file compose/Dockerfile . >/dev/null
    kill $server
}

write_keys() { # FOLDER: readable for the containers' user alone
    rm -rf "$1"
    install -d -m 700 -o 1000 -g 1000 "$1"
    docker run --rm --network none -v "$1:/keys" "$STACK_IMAGE" keys /keys
}

healthy() { # every container of these services
    for id in $(compose ps -q "$@"); do
        [ "$(docker inspect -f '{{.State.Health.Status}}' "$id")" = healthy ] || return 1
    done
}

all_up() { [ "$(compose ps -q | wc -l)" -ge 6 ] && healthy; }

post() { # PATH JSON [curl flags]
    path=$1 body=$2; shift 2
    curl -sS --max-time 120 "$@" "$at$path" -H 'Content-Type: application/json' -d "$body"
}

holds() { python3 compose/answer.py "$@"; }

answers_a_chat() {
    post /v1/chat/completions '{"model": "demo", "max_tokens": 16, "messages": [{"role": "user", "content": "Hello"}]}' \
        >"$dir/chat.json"
    holds "a.body['choices'][0]['message']['content'] and a.body['usage']['completion_tokens'] > 0" "$dir/chat.json"
}

streams_a_chat() {
    post /v1/chat/completions '{"model": "demo", "max_tokens": 32, "stream": true,
        "messages": [{"role": "user", "content": "Write a function."}]}' -N >"$dir/chat.sse"
    holds "a.done and a.text and len(a.finish) == 1" "$dir/chat.sse"
}

long_completion() { # FILE
    post /v1/completions '{"model": "demo", "prompt": "import os\n", "max_tokens": 1500, "temperature": 0,
        "ignore_eos": true, "stream": true, "stream_options": {"include_usage": true}}' -N >"$1"
}

streams_a_completion() {
    long_completion "$dir/plain.sse"
    holds "a.done and a.finish == ['length'] and a.events[-1]['usage']['completion_tokens'] == 1500" "$dir/plain.sse"
}

tokenizers_in_ring() { # COUNT
    curl -sS "$at/ring" >"$dir/ring.json" &&
        holds "sum(m['role'] == 'tokenizer_pool' and m['ready'] for m in a.body['members']) == $1" "$dir/ring.json"
}

three_tokenizers() {
    compose up -d --no-build --scale tokenizer-pool=3 >>"$dir/compose.log" 2>&1 || return 1
    within 60 tokenizers_in_ring 3 >/dev/null || { tokenizers_in_ring 3; return 1; }
}

look() { # KEYS: the membership list, as a container of its own sees it
    docker run --rm --network "${COMPOSE_PROJECT_NAME}_default" -v "$1:/keys:ro" "$STACK_IMAGE" \
        ring --message-bus tcp://message-bus:5700 --curve-keys /keys
}

strangers_are_refused() {
    write_keys "$dir/strangers"
    look "$dir/keys" >"$dir/member.log" && grep -q scheduler "$dir/member.log" || return 1
    ! look "$dir/strangers" >"$dir/stranger.log" 2>&1 && grep -q 'no answer' "$dir/stranger.log"
}

survives_a_killed() { # SERVICE: in mid-stream; the client sees a pause at most, and the same text
    long_completion "$dir/killed.sse" &
    stream=$!
    within 20 test -s "$dir/killed.sse"
    sleep 0.5
    victim=$(compose ps -q "$1" | head -n 1)
    kill -9 "$(docker inspect -f '{{.State.Pid}}' "$victim")"
    kill -0 $stream || { echo "        the stream was over before the kill"; return 1; }
    wait $stream
    holds "a.done and a.finish == ['length'] and a.text == b.text" "$dir/killed.sse" "$dir/plain.sse" || return 1
    [ "$(docker inspect -f '{{.RestartCount}}' "$victim")" -ge 1 ] && within 60 all_up
}

long_prompt() { # SET NUMBER FILE: about 2200 tokens, others for each SET and NUMBER
    body=$(python3 -c 'import json, sys; first = 4 * int(sys.argv[1]) + int(sys.argv[2]); print(json.dumps({
        "model": "demo", "max_tokens": 300, "temperature": 0, "ignore_eos": True, "stream": True,
        "prompt": "".join(f"def f{i}(x):\n    return x * {i + 3 * first}\n\n" for i in range(150))}))' "$1" "$2")
    post /v1/completions "$body" -N >"$3"
}

long_prompts() { # SET NAME: four at once
    streams=""
    for number in 1 2 3 4; do
        long_prompt "$1" $number "$dir/$2.$1.$number.sse" &
        streams="$streams $!"
    done
    # shellcheck disable=SC2086
    wait $streams
}

same_as_before() { # SET: all four streams ended, with the text of a worker for both roles
    for number in 1 2 3 4; do
        holds "a.done and a.finish == ['length'] and a.text == b.text" \
            "$dir/roles.$1.$number.sse" "$dir/both.$1.$number.sse" || return 1
    done
}

workers_in_ring() { # PREFILL DECODE: so many of each role, and none of both
    curl -sS "$at/ring" >"$dir/ring.json" &&
        holds "['decode'] * $2 + ['prefill'] * $1 == sorted(
            m['kv_role'] or 'both' for m in a.body['members'] if m['role'] == 'gpu_worker' and m['ready'])" \
            "$dir/ring.json"
}

roles() { # PREFILL DECODE: workers of each role in place of workers for both
    compose up -d --no-build --scale gpu-worker=0 --scale prefill-worker="$1" --scale decode-worker="$2" \
        >>"$dir/compose.log" 2>&1 || return 1
    within 90 workers_in_ring "$1" "$2" >/dev/null || { workers_in_ring "$1" "$2"; return 1; }
}

metric() { # NAME [LABEL="VALUE"]: the sum over its samples
    curl -sS "$at/metrics" | awk -v name="blockyard:$1{" -v label="${2:-}" \
        'index($0, name) == 1 && index($0, label) { sum += $NF } END { print sum + 0 }'
}

above() { # NUMBER NAME [LABEL="VALUE"]
    least=$1; shift
    [ "$(metric "$@")" -gt "$least" ]
}

hands_over() { # SET: its prompts by tcp
    before=$(metric kv_transfers_landed_total)
    long_prompts "$1" roles
    same_as_before "$1" || return 1
    within 15 above $((before + 3)) kv_transfers_landed_total &&
        above 10000000 kv_transfer_bytes_total 'connector="tcp"' && return
    curl -sS "$at/metrics" | grep kv_transfer
    return 1
}

num_requeued() { # times that a worker was lost with sequences on it
    docker logs "$(compose ps -q scheduler)" 2>&1 | grep -c 'is lost; [1-9]' || true
}

outlives_docker_kill() { # SET SERVICE EVENTS: kills a container once a stream has so many; docker does not restart it
    before=$(num_requeued)
    victim=$(compose ps -q "$2" | head -n 1)
    rm -f "$dir"/roles."$1".?.sse # of an earlier run
    long_prompts "$1" roles &
    load=$!
    until cat "$dir"/roles."$1".?.sse 2>/dev/null | grep -c '^data' | awk "{ exit \$1 < $3 }"; do
        kill -0 $load || return 1
        sleep 0.05
    done
    docker kill "$victim" >/dev/null
    wait $load
    same_as_before "$1" || return 1
    [ "$(num_requeued)" -gt "$before" ] || { echo "        no sequence was on the $2"; return 1; }
}

runs_unprivileged() {
    [ "$(compose exec -T scheduler id -u)" = 1000 ]
}

stops_on_sigterm() { # every container's exit code is 0
    ids=$(compose ps -q)
    compose stop >>"$dir/compose.log" 2>&1
    # shellcheck disable=SC2086
    docker inspect -f '{{.State.ExitCode}} {{.Name}}' $ids >"$dir/exits"
    ! grep -v '^0 ' "$dir/exits"
}

[ "$(id -u)" = 0 ] || { echo "needs root"; exit 1; }
install_engine
start_engine
make_base_image
build_image
write_keys "$dir/keys"

say "up"
STACK_PORT=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
export STACK_PORT
at=http://127.0.0.1:$STACK_PORT
compose up -d --no-build >"$dir/compose.log" 2>&1 || { cat "$dir/compose.log"; exit 1; }
check "all six containers are healthy" within 180 all_up
[ $failed -eq 0 ] || { compose ps; compose logs --tail 20; exit 0; }
check "services do not run as root" runs_unprivileged
check "a chat is answered" answers_a_chat
check "a chat streams" streams_a_chat
check "a completion streams to its end" streams_a_completion
check "a member with other keys is refused" strangers_are_refused
check "three tokenizers join the ring" three_tokenizers
check "a chat is answered with three tokenizers" answers_a_chat
for service in detokenizer scheduler gpu-worker tokenizer-pool message-bus; do
    check "a stream outlives a kill -9 of the $service, same text" survives_a_killed $service
done
for set in 1 2 3 4; do long_prompts $set both; done
export COMPOSE_PROFILES=roles
check "two prefill workers and a decode worker replace the gpu-worker" roles 2 1
check "prompts are handed over by tcp, same text" hands_over 1
check "streams outlive a docker kill of a prefill worker, same text" outlives_docker_kill 2 prefill-worker 1
check "streams outlive a docker kill of the decode worker, same text" outlives_docker_kill 3 decode-worker 10
check "a prefill worker and two decode workers replace these" roles 1 2
check "prompts are handed over to them, same text" hands_over 4
check "SIGTERM ends all with exit code 0" stops_on_sigterm
[ $failed -eq 0 ] || compose logs --tail 20
