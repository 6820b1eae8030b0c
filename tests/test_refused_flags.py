"""What cannot work is refused before any rank starts, in one sentence: every rule about flags, and pairs of them.

That each flag refuses numbers, texts and paths that cannot be: test_bad_input.py.
"""

import re

import pytest
from support.processes import LAB

from distlab.launch import launch
from distlab.settings.common import MOST_RANKS
from simplellm.errors import InputError

pytestmark = pytest.mark.quick

ELSEWHERE = "198.51.100.7"  # an address that no machine has
NODES = f"hybrid --nnodes {{}} --node-rank 0 --master-addr {ELSEWHERE}".format


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        # The launcher's own flags, and names.
        ("dp-gaa", "dp-gaa: no such topology or script; did you mean dp-ga?"),
        ("calibrat", "calibrat: no such topology or script; did you mean calibrate?"),
        ("--steps 3 dp-ga", "--steps: give a topology or a script first, then its flags"),
        ("my/intro_TP.py", "my/intro_TP.py: no such topology or script; did you mean tp?"),
        ("data-parallel", "data-parallel: no such topology or script; there are quickstart, hello, primer, dp-ga"),
        ("DP_GA", "DP_GA: no such topology or script; did you mean dp-ga"),
        ("dp-ga 0", "rank 0: launch.sh starts all ranks"),
        ("dp-ga --tell", "argument --tell: expected one argument"),
        ("dp-ga --seq-len 4 --tell Once,upon,a,time", "--tell is of 8 tokens: the model reads 4 at most"),
        ("dp-ga --nnodes 3 --node-rank 0 --master-addr 10.0.0.1 --tell Once", "--tell on several machines: give --out"),
        (NODES(2) + " --max-restarts 1", "--max-restarts on several machines: give --out"),
        (NODES(2) + " --repair", "--repair on several machines: one launcher must see all ranks"),
        (
            "sentiment --tell Once",
            "--tell: tp_tensor_parallel.py does not train a Llama, which could tell a story; leave --tell out",
        ),
        ("mlp-ddp --tell Once", "--tell: mlp_ddp.py does not train a Llama"),
        ("collectives --tell Once", "--tell: intro_collectives.py does not train a Llama"),
        ("mpi --tell Once", "--tell: mpi-test.py does not train a Llama"),
        ("hello --tell Once", "--tell: hello.py does not train a Llama"),
        ("hello --spares 1", "--spares 1: hello.py cannot go on when a rank dies; leave --spares out"),
        ("dp-ga --max-restarts -1", "--max-restarts -1: give 0 or more"),
        ("dp-repair --spares -1", "--spares -1: give 0 or more"),
        ("dp-ga --spares 1", "--spares 1: a spare needs a run that goes on when a rank dies; add --repair"),
        ("hybrid --nnodes 0", "--nnodes 0: give the number of machines, at least 1"),
        ("hybrid --nnodes two", "argument --nnodes: invalid int value: 'two'"),
        ("hello --world-size x", "argument --world-size/--world_size: invalid int value: 'x'"),
        ("hello --world_size 0", "--world-size 0: give 1 to 1,024 ranks"),
        ("mpi --world-size 0", "--world-size 0: every size must be at least 1"),
        ("mpi --world-size", "argument --world-size/--world_size: expected one argument"),
        ("hybrid --nnodes 2", "--nnodes 2: give each machine its --node-rank, from 0 to 1"),
        ("hybrid --nnodes 2 --node-rank 2", "--node-rank 2: --nnodes 2 has the node ranks 0 to 1"),
        ("hybrid --node-rank 1", "--node-rank 1: --nnodes 1 has the node ranks 0 to 0"),
        ("hybrid --nnodes 2 --node-rank 0", "--master-addr localhost with --nnodes 2: give the address at which"),
        ("hybrid --nnodes 2 --node-rank 0 --master-addr 127.0.0.1", "--master-addr 127.0.0.1 with --nnodes 2: give"),
        ("hybrid --nnodes 2 --node-rank 0 --master-addr no.such.host.invalid", "no.such.host.invalid: no such"),
        (
            NODES(4),
            "--dp 2 --pp 3 --tp 1 with --nnodes 4: 6 ranks do not divide among 4 machines; change one of the two "
            "numbers; or give --ranks-per-node, as in 2,2,1,1",
        ),
        (
            NODES(2) + " --ranks-per-node 4,3",
            "--ranks-per-node 4,3: --nnodes 2 and --dp 2 --pp 3 --tp 1 need 2 numbers",
        ),
        (NODES(2) + " --ranks-per-node 6,0", "need 2 numbers, each at least 1, that add up to 6"),
        (NODES(2) + " --ranks-per-node 3,2,1", "need 2 numbers, each at least 1, that add up to 6"),
        (NODES(2) + " --ranks-per-node many", "--ranks-per-node many: give a number for each machine, as in 4,2"),
        # Values.
        ("dp-ga --stepz 3", "Unrecognized options: --stepz, 3; did you mean --steps? (--help lists the flags)"),
        ("dp-ga --step 3", "Unrecognized options: --step, 3; did you mean --steps or --warmup-steps? ("),
        ("dp-ga --tracing", "Unrecognized options: --tracing (--help lists the flags)"),
        ("dp-ga --trac", "Unrecognized options: --trac; did you mean --trace? (--help lists the flags)"),
        ("dp-ga --steps x", "Error parsing --steps: 'x' is not a whole number (--help lists the flags)"),
        ("dp-ga --lr x", "Error parsing --lr: 'x' is not a number (--help lists the flags)"),
        ("dp-ga --seed 99999999999999999999", "--seed 99999999999999999999: give a number of at most 63 bits"),
        ("dp-ga --seed -99999999999999999999", "--seed -99999999999999999999: give a number of at most 63 bits"),
        ("dp-ga --steps 2147483648", "--steps 2147483648: give a number of at most 31 bits"),
        ("dp-ga --steps", "--steps: give a value (--help lists the flags)"),
        ("dp-ga --betas 0.9", "--betas: give 2 values (--help lists the flags)"),
        ("dp-ga --betas 0.9 x", "--betas 0.9 x: give it as --betas FLOAT FLOAT (--help lists the flags)"),
        ("plan --dp", "--dp: give a value (--help lists the flags)"),
        ("plan --micro-batches", "--micro-batches: give a value (--help lists the flags)"),
        ("plan --dp 1 x", "--dp 1 x: give it as --dp INT ... (--help lists the flags)"),
        ("dp-ga --optimizer lion", "--optimizer lion: give one of 'adam', 'adamw', 'sgd' (--help lists the flags)"),
        ("dp-ga --backend nccl --device cpu", "--backend nccl"),
        ("dp-ga --backend nccl --transport shared", "--transport shared: only ranks on the CPU share memory"),
        ("dp-repair --backend nccl", "--repair on: connections over NCCL cannot be left"),
        ("dp-repair --tensorboard", "--repair on with --tensorboard: the events of a dead rank would be"),
        ("dp-ga --master-port 65536", "--master-port 65536: a port is a number from 1 to 65535"),
        ("pp-gpipe --repair", "--repair: this script cannot go on when a rank dies; dp-ga and hybrid can"),
        ("dp-zero --repair", "--repair: no other rank has the shard of a dead one; dp-ga and hybrid can"),
        ("hybrid --repair --dp 1", "--repair on with --dp 1: a single pipeline has no other that holds its stages"),
        ("dp-repair --dmodel 8192 --num-heads 64 --n-layers 640", "--repair on: all ranks together would hold "),
        ("hybrid --repair --tp 2 --spares 1", "--spares 1 with --tp 2: slices are replaced together; give 2 or more"),
        ("dp-ga --residual bfloat16", "--residual bfloat16 with --dtype float32: give --dtype bfloat16 too"),
        ("dp-ga --optimizer sgd --betas 0.9 0.95", "--betas 0.9 0.95 with --optimizer sgd: only adam and adamw have"),
        ("dp-ga --warmup-steps 11 --steps 10", "--warmup-steps 11 with --steps 10: the warm-up must end within"),
        ("dp-ga --lr 1e-3 --min-lr 2e-3", "--min-lr 0.002 with --lr 0.001: give 0 or more, and at most --lr"),
        ("hybrid-repair --recompute all", "--repair on with --recompute all: "),
        ("hybrid-repair --eval-every 5", "--repair on with --eval-every: "),
        ("hybrid --repair=exact --shard optimizer", "--repair goes with the flags of dp-ga or hybrid"),
        ("pp-gpipe --repair=exact", "--repair goes with the flags of dp-ga or hybrid"),
        (
            "hybrid --repair --dmodel 16384 --num-heads 64 --n-layers 64 --batch-size 96",
            "--repair on: all ranks together would hold ",
        ),
        # The model and the batch.
        ("dp-ga --eval-sequences 65537", "--eval-sequences 65537 with --seq-len 256: 16,777,472 tokens at a time"),
        ("dp-ga --seq-len 1", "--seq-len 1: predicting the next token needs at least 2"),
        ("dp-ga --num-heads 5", "--num-heads 5 does not divide --dmodel 288"),
        ("dp-ga --dmodel 30 --num-heads 6", "--num-heads 6 gives heads of width 5 at --dmodel 30"),
        ("dp-ga --batch-size 3 --micro-batches 2", "--batch-size 3 with --micro-batches 2"),
        ("tp --num-kv-heads 4", "--num-kv-heads 4 does not divide --num-heads 6"),
        # Layouts.
        ("pp-gpipe --schedule zigzag", "--schedule zigzag: give one of naive, gpipe, dapple"),
        ("pp-dapple --layers-per-stage 3,3", "--layers-per-stage 3,3: 2 numbers for 3 stages"),
        ("pp-1f1b --layers-per-stage 3,2,2", "the numbers must add up to --n-layers 6, but add up to 7"),
        ("pp-1f1b --world-size 9", "9 stages for --n-layers 6"),
        ("pp-zb --keep-at-most 3", "--keep-at-most 3 with --schedule zb-h1: it needs --schedule auto"),
        ("pp-interleaved --chunks-per-stage 1000000000", "--n-layers 6"),
        ("pp-interleaved --chunks-per-stage 0", "--chunks-per-stage 0: must be greater than 0"),
        ("pp-gpipe --batch-size 4", "--batch-size 4 with --micro-batches 3"),
        ("tp --world-size 4", "--num-heads 6 among 4 tensor-parallel ranks"),
        ("tp --world-size 2 --num-kv-heads 3", "--num-kv-heads 3 among 2 tensor-parallel ranks"),
        ("tp --world-size 2 --tp-style naive --sequence-parallel", "--sequence-parallel with --tp-style naive"),
        ("hybrid --dp 1 --pp 1 --tp 3 --num-kv-heads 2", "--num-kv-heads 2 among 3 tensor-parallel ranks"),
        ("hybrid --dp 1 --pp 1 --tp 5", "--num-heads 6 among 5 tensor-parallel ranks"),
        ("5d --dp 1 --pp 1 --cp 2 --tp 2 --cp-kind heads", "--cp-kind heads with --cp 2: each rank gets as many of 3"),
        ("5d --dp 1 --pp 1 --cp 2 --seq-len 3", "--seq-len 3 with --cp 2: give at least 4 tokens"),
        ("cp --document-mask", "--document-mask: this script has a mask of its own; use cp-ring"),
        ("cp-ring --world-size 4 --cp-kind heads", "--cp-kind heads with --world-size 4: each rank gets as many of 6"),
        ("cp --world-size 3", "--seq-len 256 with --world-size 3: this script cuts sequences into equal parts"),
        ("pp-1f1b --document-mask", "--document-mask: only the first of this script's stages sees the tokens"),
        ("5d --dp 1 --shard optimizer", "--shard optimizer with --dp 1: a single replica has no others to share with"),
        ("5d --dp 1 --experts 4 --shard optimizer", "--shard optimizer with --dp 1"),
        ("5d --shard weights", "--shard weights with --pp 3: each stage would be gathered again"),
        ("examples/gpt_pp.py --schedule zb-v", "--schedule zb-v: gpt.py keeps one stage a worker"),
        # Experts.
        ("ep --experts 3", "--world-size 2 with --experts 3: each rank holds as many experts as the others"),
        ("ep --experts-per-token 5", "--experts-per-token 5 with --experts 4: give a number from 1 to 4"),
        ("ep --balance-rate 1.1", "--balance-rate 1.1: give a number from 0 to 1"),
        ("ep --experts -1", "--experts -1: this script is about experts; give 1 or more"),
        ("5d --experts -1", "--experts -1: give 0 or more"),
        ("5d --ep 2", "--ep 2 with --experts 0: there are no experts to share"),
        ("5d --ep 3 --experts 3", "--ep 3 with --dp 2: give a divisor of --dp"),
        ("5d --experts 4 --run-on --record-routes R", "--record-routes with --run-on"),
        ("5d --experts 4 --outer diloco", "--experts 4 with --outer diloco"),
        ("5d --experts 4 --ep 2 --shard optimizer", "--shard optimizer with --dp 2 and --ep 2"),
        ("5d --experts 4 --record-routes x --replay-routes x", "--record-routes with --replay-routes: they would be"),
        ("5d --experts 4 --cp 2 --seq-len 30", "give a multiple of 4"),
        ("5d --capacity 1.25", "--capacity 1.25: there are no experts to limit"),
        ("ep --capacity inf", "--capacity inf: give 0 for no limit"),
        ("5d --qk-norm", "--qk-norm: it is for models with experts"),
        ("5d --shared-expert", "--shared-expert: it is for models with experts"),
        ("5d --router-scores sigmoid", "--router-scores sigmoid: it is for models with experts"),
        ("calibrate m.json --experts -1", "--experts -1: give 0 for none"),
        ("calibrate m.json --experts 4 --experts-per-token 5", "--experts-per-token 5: there are 4 experts; give a"),
        ("calibrate m.json --experts 4 --compile", "--compile with --experts 4: of compiled passes, the planner knows"),
        ("calibrate m.json --world-size 1", "--world-size 1: messages need 2 ranks or more"),
        # Averages, and what is averaged.
        ("dp-wa --clip-norm 1", "--clip-norm 1: each rank has gradients of its own"),
        ("dp-wa --save-every 3 --sync-every 2", "--save-every 3 with --sync-every 2: between two averages there is no"),
        ("dp-wa --eval-every 3 --sync-every 2", "--eval-every 3 with --sync-every 2: between two averages there is no"),
        ("dp-ga --compress topk --topk-share 2", "--topk-share 2: a share is at most 1"),
        ("dp-ga --compress powersgd --all-reduce ring", "--compress powersgd with --all-reduce ring"),
        ("dp-buckets --all-reduce ring --backend nccl", "--all-reduce ring with --backend nccl: it works over gloo"),
        ("dp-ga --all-reduce ring --transport shared", "--all-reduce ring with --transport shared: our own work sends"),
        ("diloco --sync-every 10 --fragments 3", "--fragments 3 with --sync-every 10: "),
        ("diloco --sync-every 2 --fragments 4", "give at most 2"),
        ("diloco --sync-every 8 --fragments 4 --overlap-steps 2", "give 0 to 1"),
        ("diloco --steps 20", "--steps 20 with --sync-every 50"),
        ("diloco --merge-alpha 1", "--merge-alpha 1: give a number from 0 to less than 1"),
        ("diloco --clip-norm 1", "--clip-norm 1: each rank has gradients of its own"),
        ("hybrid --sync-every 10", "add --outer diloco"),
        ("hybrid --outer diloco --sync-every 0", "--sync-every 0: must be greater than 0"),
        ("hybrid --outer diloco --steps 20", "--steps 20 with --sync-every 50"),
        ("hybrid --outer diloco --clip-norm 1", "--clip-norm 1: each rank has gradients of its own"),
        ("hybrid --outer diloco --shard optimizer", "--outer diloco with --shard optimizer"),
        ("hybrid --outer diloco --run-on", "--outer diloco with --run-on"),
        ("hybrid --run-on --report-every 2", "--report-every 2 with --run-on"),
        ("dp-ga --run-on --report-every 2", "--report-every 2 with --run-on"),
        ("hybrid --outer diloco --pp 1 --tp 2 --compress int4", "--compress int4 with --tp 2: "),
        # Scripts that train no Llama.
        ("mlp-ddp --train-size 5 --batch-size 2", "--train-size 5: a batch for each of 3 ranks takes 6 inputs"),
        ("dist --shapes 32769x1x32768", "give matrices of at most 1,073,741,824 numbers each"),
        (f"dist --shapes 1x{'9' * 5000}x1", "give matrices of at most 1,073,741,824 numbers each"),
        ("race --processes 1", "--processes 1: "),
        ("collectives --backend nccl", "--backend nccl with --device cpu"),
        ("collectives --device cuda", "run on the CPU: leave --device out"),
        ("sentiment --world-size 4 --tp 3", "--world-size 4 with --tp 3"),
        ("sentiment --world-size 4 --tp 4 --heads 2", "--heads 2 with --tp 4"),
        ("sentiment --dim 66", "--dim 66 with --heads 4"),
        ("sentiment --world-size 4 --tp 1 --bsz 3", "--bsz 3"),
        ("sentiment --samples 8 --bsz 16", "--bsz 16: give at least a review for each"),
        ("sentiment --dropout 1", "--dropout 1"),
    ],
)
def test_what_cannot_work_is_refused_before_any_rank_starts(
    command: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_rank(*_: object) -> int:
        raise AssertionError("ranks were started")

    monkeypatch.setattr("distlab.launching.start.run_ranks", no_rank)
    monkeypatch.setattr("os.execv", no_rank)  # by which a process becomes mpirun
    monkeypatch.chdir(LAB)
    with pytest.raises(InputError, match=re.escape(sentence)) as caught:
        launch(command.split())
    assert "\n" not in str(caught.value)
    assert ("goes with the flags of" in str(caught.value)) == ("goes with the flags of" in sentence)


@pytest.mark.parametrize(
    "command",
    [
        "hybrid --repair --tp 2 --spares 2",
        "dp-ga --seed 9223372036854775807 --eval-sequences 65536 --steps 5 --warmup-steps 5",
        "dp-ga --lr-schedule cosine --lr 1e-3 --min-lr 1e-3",
        "dp-ga --compress topk --topk-share 1",
        "dp-ga --tell Once --out nowhere",  # and a run that fails tells no story
        "dp-wa --sync-every 3 --steps 10 --save-every 10 --eval-every 20",
        "diloco --sync-every 8 --steps 8 --fragments 4 --overlap-steps 1 --merge-alpha 0 --outer-momentum 0",
        "ep --balance-rate 1 --experts-per-token 4",
        "5d --dp 1 --pp 1 --cp 2 --shard optimizer",
        f"race --processes {MOST_RANKS}",
        "5d --dp 2 --pp 1 --ep 2 --cp 2 --experts 4 --shard optimizer",
    ],
)
def test_what_only_just_works_is_not_refused(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distlab.launching.start.run_ranks", lambda *_: 42)
    monkeypatch.chdir(LAB)
    assert launch(command.split()) == 42
