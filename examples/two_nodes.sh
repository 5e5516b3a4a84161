#!/usr/bin/env bash
# Two "nodes" on one machine: two network namespaces, joined by a virtual cable and nothing else.
#
# A small model trains on both under torchrun.  Then one node dies; it is started again, both meet, and the run goes on
# from its newest checkpoint.  Needs root and iproute2 (on Debian: apt-get install iproute2).
#
#   sudo examples/two_nodes.sh [FOLDER] [STEPS]
set -euo pipefail

folder=${1:-$(mktemp -d)}
steps=${2:-60}
python=${PYTHON:-python3}
a=debubble-a-$$ b=debubble-b-$$
mkdir -p "$folder"

clean_up() {
    for namespace in "$a" "$b"; do
        ip netns pids "$namespace" 2>/dev/null | xargs --no-run-if-empty kill -KILL || true
        ip netns delete "$namespace" 2>/dev/null || true
    done
}
trap clean_up EXIT

for namespace in "$a" "$b"; do ip netns add "$namespace"; done
ip link add eth0 netns "$a" type veth peer name eth0 netns "$b"
ip netns exec "$a" ip address add 10.77.0.1/24 dev eth0
ip netns exec "$b" ip address add 10.77.0.2/24 dev eth0
for namespace in "$a" "$b"; do
    ip netns exec "$namespace" ip link set lo up
    ip netns exec "$namespace" ip link set eth0 up
done

debubble() { "$python" -c 'import sys; from debubble.cli import main; sys.exit(main())' "$@"; }
debubble plan llama-tiny --cluster 2xCPU --micro-batches 4 --sequence-length 64 --dtype fp32 --planner megatron-even \
    -o "$folder/plan.json" >"$folder/plan.txt"

# One torchrun per node, as on real ones.  `is_host` says which one keeps the rendezvous; real nodes find out themselves.
# Agents that share their store tell its address once: a node that takes another's place later would wait for it in vain.
node() { # namespace, address, is_host
    exec ip netns exec "$1" env GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1 \
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 "$python" -m torch.distributed.run \
        --nnodes 2 --nproc-per-node 1 --max-restarts 5 --local-addr "$2" \
        --rdzv-backend c10d --rdzv-endpoint 10.77.0.1:29500 --rdzv-id two-nodes --rdzv-conf "is_host=$3" \
        -m debubble train "$folder/plan.json" --steps "$steps" \
        --checkpoint "$folder/checkpoints" --save-every 10 --auto-resume --json
}
node "$a" 10.77.0.1 true >"$folder/a.txt" 2>"$folder/a.log" &
first=$!
node "$b" 10.77.0.2 false >"$folder/b.txt" 2>"$folder/b.log" &

until ls -d "$folder"/checkpoints/step-* >/dev/null 2>&1; do
    kill -0 "$first" || { cat "$folder/a.log"; exit 1; }
    sleep 0.2
done
ip netns pids "$b" | xargs kill -KILL
saved=$(ls "$folder/checkpoints" | tail -n 1)
echo "node b has died; the newest checkpoint is $saved"

node "$b" 10.77.0.2 false >"$folder/b-again.txt" 2>"$folder/b-again.log" &
second=$!
echo "node b has been started again"
wait "$first" "$second"

"$python" - "$folder" "$saved" <<'PYTHON'
import json, pathlib, sys

folder, saved = pathlib.Path(sys.argv[1]), int(sys.argv[2].removeprefix("step-"))
outcomes = [file.read_text() for file in (folder / "a.txt", folder / "b-again.txt")]
outcome = json.loads(next(text for text in outcomes if text.strip()))
first = outcome["steps"] - len(outcome["losses"])
assert saved <= first < outcome["steps"], (saved, first)
print(f"the run went on from step {first} and ended at step {outcome['steps']}, loss {outcome['losses'][-1]:.3f}")
PYTHON
