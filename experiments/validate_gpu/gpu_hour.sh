#!/bin/sh
# An hour on a GPU: five commands, each under ten minutes, and what is done at home between them.
#
#   sh experiments/validate_gpu/gpu_hour.sh 1|2|home|3|4|5        make gpu-hour STEP=1
#
# Results are in OUT (default runs/gpu-hour), and all of it in OUT.tar.gz: bring that one file back after each command, and
# have OUT there before the next (tar xzf). On the GPU machine: PyTorch, CuPy, Numba, NumPy, SciPy, PyYAML, pytest.
# At home: the whole project. BACKEND=host rehearses all of it without a GPU, in small.
set -u
BACKEND=${BACKEND:-cuda}
OUT=${OUT:-runs/gpu-hour}
PYTHON=${PYTHON:-python3}
export PYTHONUNBUFFERED=1
mkdir -p "$OUT/logs"

validate="$PYTHON -m experiments.validate_gpu backend=$BACKEND out=$OUT"
if [ "$BACKEND" = host ]; then
    first=tiny_resnet all=tiny_resnet,tiny_gpt2 planners=capuchin,autoswap_swdoa,lp_round limits=0.7 bytes=1048576
    train=capuchin,lp_round
else
    first=resnet50_imagenet_bf16 all=resnet50_imagenet_bf16,llama_bf16,gpt2_medium_bf16,resnet50_imagenet,vgg16
    planners=capuchin,superneurons,autoswap_swdoa,lp_round limits=0.7,0.5,0.35 bytes=1073741824
    train=capuchin,lp_round
fi
seconds=${SECONDS_EACH:-540}
few="planners=$planners train=$train limits=$limits"
end=$(($(date +%s) + seconds))

left() { now=$(date +%s); echo $((end - now > 10 ? end - now : 10)); }
# run NAME COMMAND…: no longer than is left; what it says is in OUT/logs, too.
run() {
    name=$1; shift
    echo "== $name: $*"
    timeout -s INT "$(left)" "$@" > "$OUT/logs/$name.log" 2>&1
    status=$?
    tail -n 25 "$OUT/logs/$name.log"
    echo "== $name: exit status $status"
}
packed() {
    tar czf "$OUT.tar.gz" --exclude=.lock -C "$(dirname "$OUT")" "$(basename "$OUT")"
    echo "== all of it: $OUT.tar.gz"
}

case "${1:-}" in
1)  # Does anything work?
    run smi nvidia-smi
    run calibrate $validate stages=calibrate seconds=60
    run smoke $validate stages=profile,plan,replay,train workloads=$first limits=0.7 planners=capuchin train=capuchin \
        graph= methods=eager seconds=200
    run tests $PYTHON -m tests.gpu
    cat <<'EOT'
Look at: logs/tests.log, its last lines: each file passed. A file that failed: its own part of the log, the first error.
profiles/: step_ns beside the sum of durations_ns (a profile whose sum was far above was mostly events).
EOT
    ;;
2)  # Is it the same twice? One network whole.
    run again $PYTHON -m executor.calibrate "$OUT/again.yaml" --backend $BACKEND --machine "$OUT/machine.yaml" \
        --max-bytes $bytes --beside "$OUT/machine.yaml"
    run whole $validate workloads=$first $few methods=eager seconds=$(($(left) * 6 / 10))
    run profiles $validate stages=profile workloads=$all limits=$limits seconds=$(($(left) - 15))
    cat <<'EOT'
Look at: logs/again.log: bandwidths and latency within a few per cent of the first calibration, launch and issue, too.
table.md: errors of replays (mean at most 2 %, worst 5 %), of training; bits equal to eager's; peaks at most the limit.
Then at home: this script with `home`.
EOT
    ;;
home)  # Without a GPU: plans for everything that was profiled.
    end=$(($(date +%s) + ${PLANNING:-3600}))
    run plan $validate stages=plan workloads=$all $few seconds=$(left)
    cat <<'EOT'
Look at: logs/plan.log: which planner has no plan, and why. `reproduce figure=measured` draws the profiles of measured/ that
were copied to tests/data/measured.
EOT
    ;;
3)  # Are there races, or addresses that are nobody's?
    if command -v compute-sanitizer > /dev/null; then
        for tool in memcheck racecheck synccheck; do
            run $tool compute-sanitizer --tool $tool --error-exitcode 9 $PYTHON -m pytest -q -m gpu -p no:cacheprovider \
                tests/executor/replay/test_backend.py -k "not exact and not fast and not contend"
        done
        run planned compute-sanitizer --tool memcheck --error-exitcode 9 $PYTHON -m pytest -q -m gpu -p no:cacheprovider \
            tests/executor/training/test_faults.py tests/executor/training/test_cuda_graph.py -k "stream or small"
    else
        echo "there is no compute-sanitizer here"
    fi
    rm -rf "$OUT-repeat"; mkdir -p "$OUT-repeat"
    run repeat $PYTHON -m experiments.validate_gpu backend=$BACKEND out=$OUT-repeat stages=replay,train workloads=$first $few \
        graph= machine=$OUT/machine.yaml profiles=$OUT/profiles plans=$OUT/plans seconds=$(left)
    cp "$OUT-repeat/table.md" "$OUT/repeat.md"
    cat <<'EOT'
Look at: logs of memcheck, racecheck, synccheck: "0 errors". repeat.md beside table.md: what differs is the spread of a run.
EOT
    ;;
4)  # The targets.
    run targets $validate stages=replay,train workloads=$all $few seconds=$(left)
    cat <<'EOT'
Look at: table.md, its last lines: replays and training, mean absolute error at most 2 %, worst 5 %, peaks within 0.5 % and
none over its limit; at 70 % the trained step at most 5 % slower than eager's beside it (results.json: eager_ns).
EOT
    ;;
5)  # The rivals.
    run rivals $validate stages=compare,largest workloads=$first,${all#*,} limits=0.7,0.5 seconds=$(left) \
        methods=eager,ours,checkpoint,selective,offload
    cat <<'EOT'
Look at: table.md, the comparison: ours the fastest at each limit; the largest batch at least twice eager's.
torch.compile and save_on_cpu are left out: they take their own command (methods=eager,compile).
EOT
    ;;
*)  echo "usage: sh $0 1|2|home|3|4|5" >&2; exit 2 ;;
esac
packed
