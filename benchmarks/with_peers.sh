#!/bin/bash
# Ours and vLLM's DSpark one after the other on one GPU, in one table. From the repository's root, with the peers' kit
# unpacked from PEERS (a folder that holds run_peers.sh):
#
#     OUT=folder COMMIT=id [PEERS=.peer] [BATCHES=1,8,32] [PARTS=alone,together] [BUDGET=560] bash benchmarks/with_peers.sh
#
# Ours takes about 150 s, the peers 200 to 340 s; whatever is done is in $OUT/decode.json when time runs out.
set -u
OUT=${OUT:?a folder for the report and the logs}
PEERS=${PEERS:-.peer}
BUDGET=${BUDGET:-560}
began=$(date +%s)
mkdir -p "$OUT"
report=$OUT/decode.json
chat=$(python3 -c 'import sys; sys.path[:0] = ["benchmarks", "."]; from gpu_decode import chat_length; print(chat_length())')

python3 benchmarks/gpu_decode.py --quick --parts "${PARTS:-alone,together}" ${OVERLAP:+--overlap "$OVERLAP"} \
    --commit "${COMMIT:-unknown}" --out "$report" >"$OUT/ours.txt" 2>"$OUT/ours.err"
echo "ours: rc $?, $(($(date +%s) - began)) s"

left=$((BUDGET - $(date +%s) + began))
OUT=$OUT BATCHES=${BATCHES:-1,8,32} LENS=3.72,5.52,$chat timeout "$left" bash "$PEERS/run_peers.sh"
echo "peers: rc $?, $(($(date +%s) - began)) s in all"
python3 benchmarks/peers.py "$report" "$OUT"
