"""Scripts are evaluated like bash: the expected words are those that bash passes to `run`."""

from __future__ import annotations

from pathlib import Path

import pytest

from debubble.imports.command_line import CommandLine, args_hint
from debubble.imports.settings import read_arguments
from debubble.imports.shell.scripts import follow
from debubble.ir import InputError

AS_IN_BASH = [
    ('A="x y"; run $A "$A" \'$A\'', ["x y x y $A"], 4),
    ('A=(--x 1 "--y 2" "z w"); run "${A[@]}"', ["--x 1 --y 2 z w"], 4),
    ('A=(--x 1 "--y 2"); run ${A[@]} tail', ["--x 1 --y 2 tail"], 5),
    ('A=(1 2); run pre"${A[@]}"post "${A[*]}"', ["pre1 2post 1 2"], 3),
    ("N=4; T=$((N*2+1)); run $T ${T} $((T/3)) ${N}x", ["9 9 3 4x"], 4),
    ("S=7B; if [ $S = 7B ]; then L=32; elif [ $S = 13B ]; then L=40; fi; run $L", ["32"], 1),
    ("S=13B; case $S in 7B) L=32;; 13B|14B) L=40 ;; *) L=0;; esac; run $L", ["40"], 1),
    ("X=; [ -z $X ] && X=5; [[ -n $X && $X -gt 4 ]] && Y=yes || Y=no; run $X $Y", ["5 yes"], 2),
    ('f() { run --in $1 "$2" $#; }; f a "b c"', ["--in a b c 2"], 4),
    ('for i in 1 2 3; do A+=" --n $i"; done; run $A', ["--n 1 --n 2 --n 3"], 6),
    ("A=(1 2); A+=(3); run ${#A[@]} ${A[1]} ${A[-1]}", ["3 2 3"], 3),
    ("P=/a/b.tar.gz; run ${P##*/} ${P%.gz} ${P%%.*} ${P/b/Q}", ["b.tar.gz /a/b.tar /a/b /a/Q.tar.gz"], 4),
    ("run --a 1 \\\n  --b 2 # --c 3\nrun --d", ["--a 1 --b 2", "--d"], 4),
    ("cat <<EOF\n--not 1\nEOF\nrun 'say \"so\"' a\\ b", ['say "so" a b'], 2),
    ("V=${V:-8}; W=${W-9}; : ${Q:=3}; run $V $W $Q ${V:+set} x${NO:+y}z", ["8 9 3 set xz"], 5),
    ("set -- p q; run $1 \"$@\" $#; shift; run $*", ["p p q 2", "q"], 4),
    ("A=5; ((A > 3)) && run big; if (( A % 2 == 1 )); then run odd; fi", ["big", "odd"], 1),
    ("run a > /dev/null 2>&1; run d &> /dev/null &", ["a", "d"], 1),
    ("X=Ab; run ${X,,} ${X^^}", ["ab AB"], 2),
    ("bash -c \"run --q 1 'a b'\"; eval 'run $((1 + 1))'", ["--q 1 a b", "2"], 3),
    ("A=1; A=2 run $A; run $A", ["1", "1"], 1),
    ("if ! [ 1 -eq 2 ]; then run no; fi; [ 1 -eq 1 -a 2 -eq 3 ] || run good", ["no", "good"], 1),
    ('X="a*b"; [[ $X == a* ]] && run star; [[ abc =~ ^a.c$ ]] && run re', ["star", "re"], 1),
    ('E=(); run "${E[@]}" x ${E[@]}', ["x"], 1),
    ("run 'Et*3|(tt|)*2,t|L' \"E|t\"", ["Et*3|(tt|)*2,t|L E|t"], 2),
    ("false || run one; true || run never; exit 0; run never", ["one"], 1),
    ("{ run a; }; ( run b )", ["a", "b"], 1),
    ("for ((i=0; i<3; i++)); do A+=($((i > 1 ? 7 : i))); done; run ${A[@]}", ["0 1 7"], 3),
    ('A=(0 1); printf -v F "[%s]" "$(IFS=\', \'; echo "${A[*]}")"; run $F', ["[0,1]"], 1),
    ("((x=3)); ((x+=2)); ((x++)); run $x $?", ["6 0"], 2),
    ('srun --jobid 1 bash -c "run --m \'a|b\'"', ["--m a|b"], 2),
    ("A=\"x `y \"z\"` w\"; run \"$A\" 1", ['x `y "z"` w 1'], 2),
    ("[ -z $OUT ] && exit 1; run on", ["on"], 1),
    ("set -- --x; while [ $# -gt 0 ]; do case $1 in --y) shift;; *) exit 1;; esac; done; run on", ["on"], 1),
    ("for i in $(seq 1 3); do A+=\" $i\"; done; run $A", ["1 2 3"], 3),
    ("N=2; for i in `seq $N`; do run $i; done", ["1", "2"], 1),
    ("for i in $(seq 0 4 9); do run $i; done", ["0", "4", "8"], 1),
    ("for i in $(seq 2 -1 1); do run $i; done", ["2", "1"], 1),
    ("for i in {1..3}; do A+=($i); done; run ${A[@]}", ["1 2 3"], 3),
    ("run {4..0..2} x{a,b{1,2}}y {one} '{a,b}' ${Q:-q}{,z}", ["4 2 0 xay xb1y xb2y {one} {a,b} q qz"], 10),
    ("for i in 1 2 3; do [ $i -eq 3 ] && break; [ $i = 1 ] && continue; run $i; done", ["2"], 1),
    ("while true; do run --n 1; break; done", ["--n 1"], 2),
    (
        "set -- -t 4 -fp2 rest; while getopts 't:p:f' o; do case $o in t) T=$OPTARG;; p) P=$OPTARG;; esac; done;"
        " shift $((OPTIND - 1)); run $T $P $1",
        ["4 2 rest"],
        3,
    ),
]  # fmt: skip
"""A script, the words that bash passes to each `run` (joined by blanks), and the word count of the first."""


@pytest.mark.parametrize(("script", "runs", "words"), AS_IN_BASH)
def test_a_script_is_read_as_bash_reads_it(script: str, runs: list[str], words: int) -> None:
    started = [command.words[1:] for command in follow(script, Path("job.sh")).commands]

    assert [" ".join(words) for words in started] == runs
    assert len(started[0]) == words


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("if [ $SIZE = 7B ]; then A=--bf16; fi; run $A", r"line 1 decides \(\[ \$SIZE = 7B \]\)"),
        ("if [ $SIZE = 7B ]; then run --lr 1; else run --lr 2; fi", "line 1 decides"),
        ("M=${SIZE}B; if [ $M = 7B ]; then A=--bf16; fi; run $A", "give it with --args 'SIZE=1'; or give a copy"),
        (
            "B=$((1-$?)); if [ $B = 1 ]; then A=--bf16; fi; run $A",
            "depend on it: give it with --args 'B=1'; or give a copy",
        ),
        ("if [ -f x ]; then A=--bf16; fi; run $A", "line 1 decides"),
        ("while true; do A+=1; done; run $A", "too long to follow"),
        ("if nvidia-smi | grep -q H100; then A=--bf16; fi; run $A", r"\(nvidia-smi \| grep -q H100\) is not told"),
        ("if python ready.py; then A=--bf16; fi; run $A", r"line 1 decides \(python ready.py\)"),
        ("if ! ls data; then run --lr 1; fi", r"line 1 decides \(ls data\)"),
        ("grep -q x y; if [ $? -eq 0 ]; then A=--bf16; fi; run $A", r"line 1 decides \(\[ \$\? -eq 0 \]\)"),
        ("if [[ $(hostname) =~ gpu ]]; then A=--bf16; fi; run $A", "line 1 decides"),
        ("ready() { curl x; }; if ready | grep -q on; then A=--bf16; fi; run $A", "line 1 decides"),
        ("while [ -f x ]; do A+=(--x); done; run $A", r"line 1 decides \(\[ -f x \]\)"),
        ("case $SIZE in a) A=--x;; b) A=--y;; esac; run $A", r"decides \(\$SIZE\)"),
        ("for ((i=0; i<$N; i++)); do A+=(--bf16); done; run $A", r"line 1 decides \(i<\$N\)"),
        ("run --num-layers 'x", "No closing '"),
        ("f() { f; }; f", "too long to follow"),
        ("if [ 1 = 1 ]; then run --x", "'fi' is missing"),
        ("run()", "It ends too early"),
        ("{ " * 5000, "nested too deeply"),
        (f"A=aa; for i in {' '.join(map(str, range(40)))}; do A=$A$A; done; run $A", "more than 1,000,000 letters"),
        ("if [[ aaaa =~ ^(a+)+$ ]]; then run --lr 1; fi", "line 1 decides"),
    ],
)
def test_undecidable_condition_is_refused(script: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        follow(script, Path("job.sh"))


@pytest.mark.parametrize(
    ("script", "by"),
    [
        ("L=1\nif [ $SIZE = 7B ]; then L=32; fi; run $L", " by $SIZE"),
        ("L=1\ncase $SIZE in a) L=1;; b) L=2;; esac; run $L", " by $SIZE"),
        ("S=$1\nif [ $S = 7B ]; then L=32; fi; run $L", " by $1"),
        ("L=1\n[ -f x ] && L=2; run $L", ""),
        ("L=1\nif [ -f x ]; then export L=2; fi; run $L", ""),
        ("L=1\nif echo $SIZE | grep -q 70; then L=2; fi; run $L", " by $SIZE"),
        ("L=1\nwhile read EACH; do L=$EACH; done < file; run $L", ""),
        ("L=1\nif curl -s x; then L=2; fi; run $L", ""),
    ],
)
def test_variable_set_under_an_open_condition_is_unknown(script: str, by: str) -> None:
    [command] = follow(script, Path("job.sh")).commands

    assert command.words == ("run", f"$(L: line 2 decides{by})")


@pytest.mark.parametrize(
    ("unknown", "message"),
    [
        ("$(L: line 2 decides by $SIZE)", "give it with --args 'SIZE=1'"),
        ("$(L: line 2 decides by $1)", "give the script's arguments with --args '1 8 ...'"),
        ("$(L: line 2 decides)", "give it with --args 'L=1'"),
    ],
)
def test_deciding_variables_are_requested(unknown: str, message: str) -> None:
    assert args_hint(unknown, {}) == message


@pytest.mark.parametrize(
    ("script", "loop"),
    [
        ("for i in $(seq 1 $RUNS); do run --lr 1 $i; done", "line 1: for i in $(seq 1 $RUNS)"),
        ("for ((i=0; i<$N; i++)); do run --lr 1 $i; done", "line 1: i<$N"),
        ("for host in $(cat hosts); do ssh $host run --lr 1; done", "line 1: for host in $(cat hosts)"),
        ("for i in {1..$N}; do run --lr 1; done", "line 1: for i in {1..$N}"),
        ("go() { run --lr 1; }\nwhile [ -f x ]; do go; done", "line 2: [ -f x ]"),
    ],
)
def test_a_program_in_an_open_loop_starts_once(script: str, loop: str) -> None:
    [command] = follow(script, Path("job.sh")).commands

    assert command.loop == loop


@pytest.mark.parametrize("start", ["run --lr 1", "go"])
def test_endless_restarts_are_one_program(start: str) -> None:
    script = f"go() {{ run --lr 1; }}; while true; do {start}; sleep 1; done"

    assert [command.words for command in follow(script, Path("job.sh")).commands] == [("run", "--lr", "1")]


@pytest.mark.parametrize(("arguments", "words"), [(None, ("2", "1")), ("-t 4", ("4", "1"))])
def test_options_of_getopts_have_defaults(arguments: str | None, words: tuple[str, ...]) -> None:
    script = "T=2; P=1; while getopts t:p: o; do case $o in t) T=$OPTARG;; p) P=$OPTARG;; esac; done; run $T $P"
    line = None if arguments is None else CommandLine.parse(arguments)

    [command] = follow(script, Path("job.sh"), line).commands

    assert command.words[1:] == words


def test_a_sweep_is_refused_unless_arguments_decide(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("for TP in 1 2; do run --num-layers 4 --bf16 --tensor-model-parallel-size $TP --lr 0.$TP; done\n")

    with pytest.raises(InputError, match=r"\(line 1, with --tensor-model-parallel-size 1 and 2\): give the arguments"):
        read_arguments(script)

    line = CommandLine.parse("--tensor-model-parallel-size 4")
    assert read_arguments(script, line)["--tensor-model-parallel-size"] == "4"


def test_given_variable_resolves_a_condition() -> None:
    script = "L=1\nif nvidia-smi | grep -q H100; then L=2; fi; run --lr $L"
    [command] = follow(script, Path("job.sh"), CommandLine.parse("L=3")).commands

    assert command.words == ("run", "--lr", "3")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("#SBATCH --nodes=4\n#SBATCH --gpus-per-node 8  # of H100", "32 4"),
        ("#SBATCH -N 2\n#SBATCH --gpus-per-node=4", "8 2"),
        ("#SBATCH --nodes=2-4\n#SBATCH --gpus-per-node=4", "$(($SLURM_NNODES*4)) $SLURM_NNODES"),
    ],
)
def test_slurm_directives_set_variables(lines: str, words: str) -> None:
    script = f"#!/bin/bash\n{lines}\nrun $(($SLURM_NNODES*$SLURM_GPUS_PER_NODE)) $SLURM_NNODES"
    [command] = follow(script, Path("job.sh")).commands

    assert " ".join(command.words[1:]) == words


@pytest.mark.parametrize("script", ["if run --bf16; then echo done; fi", "run --bf16 || exit 1", "cd x && run --bf16"])
def test_a_training_may_be_a_condition(script: str) -> None:
    assert [command.words for command in follow(script, Path("job.sh")).commands] == [("run", "--bf16")]


def test_unknown_options_before_the_training_script_are_removed() -> None:
    script = "if [ -d x ]; then R=--requeue; fi\nsrun $R -l train.py --bf16"

    [command] = follow(script, Path("job.sh")).commands

    assert command.words == ("srun", "-l", "train.py", "--bf16")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("if [ -d x ]; then A=--finetune; fi; run --bf16 $A", "--bf16"),
        ("A=(--bf16); [ -d x ] && A+=(--load x --no-load-rng); run ${A[@]}", "--bf16"),
        (
            "for p in $*; do if [[ $p == --w* ]]; then W=${p#*=}; fi; done; [[ $W == t ]] && A=--x; run --lr 1 $A",
            "--lr 1",
        ),
        ("while [ $# -gt 0 ]; do W=$1; shift; done; if [ $W = t ]; then A=--x; fi; run --lr 1 $A", "--lr 1"),
        ("if [ -f no.sh ]; then source no.sh; fi; run --bf16", "--bf16"),
        ("if [[ -v NOOP ]]; then set -n; fi; run --bf16", "--bf16"),
        ("u() { echo; }; if [ $# -eq 0 ]; then u; exit 1; fi; run --bf16", "--bf16"),
    ],
)
def test_branches_without_training_arguments_are_skipped(script: str, words: str) -> None:
    [command] = follow(script, Path("job.sh")).commands

    assert [word for word in command.words[1:] if not word.startswith("$")] == words.split()


def test_open_options_of_the_training_are_refused() -> None:
    with pytest.raises(InputError, match="line 1 decides"):
        follow("if [ -d x ]; then A=--bf16; fi\nsrun -l train.py $A", Path("job.sh"))


def test_a_condition_without_consequences_is_passed_over() -> None:
    script = "if [ ! -d $OUT ]; then mkdir -p $OUT; fi\n[ -z $2 ] || echo two\nrun --bf16"

    assert [command.words for command in follow(script, Path("job.sh")).commands] == [("run", "--bf16")]


PARSING = """GBS=64
while [[ $# -gt 0 ]]; do
  case $1 in
    --gbs) GBS="$2"; shift; shift;;
    *) shift;;
  esac
done
if [ "$3" == "" ]; then LEN=1024; fi
run $GBS $LEN"""


@pytest.mark.parametrize(("arguments", "words"), [(None, ("64", "1024")), ("--other --gbs 8", ("8", "1024"))])
def test_script_may_parse_its_options(arguments: str | None, words: tuple[str, ...]) -> None:
    line = None if arguments is None else CommandLine.parse(arguments)
    [command] = follow(PARSING, Path("job.sh"), line).commands

    assert command.words[1:] == words


def test_arguments_and_environment_of_a_script_are_used() -> None:
    script = "TP=$1; if [ $MODE = long ]; then N=$2; else N=1; fi; run $TP $N $#"

    [command] = follow(script, Path("job.sh"), CommandLine.parse("MODE=long 4 '8'")).commands

    assert command.words == ("run", "4", "8", "2")


def test_option_is_not_a_positional_argument() -> None:
    script = "TP=${1:-4}\nPP=$2\nrun --tensor $TP"

    with pytest.raises(InputError, match=r"--cp of --args would be TP: .* in this order: TP PP"):
        follow(script, Path("job.sh"), CommandLine.parse("--cp 2"))


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    script = (
        f"touch {tmp_path}/made; X=$(touch {tmp_path}/made); eval 'touch {tmp_path}/made'; run `touch {tmp_path}/made`"
    )

    follow(script, tmp_path / "job.sh")

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("model.sh", 'source "$HERE/scripts/model.sh"'),
        ("models/model.sh", 'DIR="$(cd "$(dirname "$0")" && pwd)"\nsource "${DIR}/models/model.sh"'),
    ],
)
def test_a_sourced_script_is_read(tmp_path: Path, place: str, line: str) -> None:
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text("MODEL_ARGS=(--num-layers 4)\n")
    (tmp_path / "job.sh").write_text(f"{line}\npython train.py ${{MODEL_ARGS[@]}} --bf16\n")

    assert read_arguments(tmp_path / "job.sh") == {"--num-layers": "4", "--bf16": True}


def test_a_sourced_script_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text("source $HOME/model.sh\nrun --lr 1\n")

    assert read_arguments(tmp_path / "job.sh") == {"--lr": "1", "source": ("$HOME/model.sh",)}


def test_unset_variable_is_an_entry(tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text("run --num-layers 4 ${MODEL_ARGS[@]} --lr $LR $MORE --bf16\n")

    assert read_arguments(tmp_path / "job.sh") == {
        "--num-layers": "4", "${MODEL_ARGS[@]}": True, "--lr": "$LR", "$MORE": True, "--bf16": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("command", "name"),
    [("basename $FILE", "eight.yaml"), ("basename conf/$FILE .yaml", "eight"), ("basename $NOBODY", None)],
)
def test_file_name_commands_are_evaluated(command: str, name: str | None, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(f"FILE=conf/eight.yaml\nrun --num-layers 4 --lr $({command}) --bf16\n")

    assert read_arguments(tmp_path / "job.sh")["--lr"] == (name or f"$({command})")


def test_a_condition_names_its_variable_not_its_command(tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(
        'if [ "$(basename "$FILE")" = a ]; then run --num-layers 4; else run --num-layers 8; fi\n'
    )

    with pytest.raises(InputError, match="give it with --args 'FILE=1'"):
        read_arguments(tmp_path / "job.sh")


def test_several_trainings_in_a_script_are_refused(tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text("run --num-layers 4 --bf16\nrun --num-layers 8 --bf16\n")

    with pytest.raises(InputError, match=r"starts several trainings \(lines 1, 2\)"):
        read_arguments(tmp_path / "job.sh")


@pytest.mark.parametrize("queued", ['sbatch "$0"', "mkdir -p logs; qsub $0"])
def test_a_script_that_submits_itself_is_read_as_its_job(queued: str) -> None:
    script = f"if [ -z $SLURM_JOB_ID ]; then {queued}; exit; fi\nrun --bf16"

    assert [command.words for command in follow(script, Path("job.sh")).commands] == [("run", "--bf16")]


def test_a_function_that_ends_with_an_error_is_not_reached() -> None:
    script = 'die() { echo "$*"; exit 1; }\n[ -d data ] || die none\nrun --bf16'

    assert [command.words for command in follow(script, Path("job.sh")).commands] == [("run", "--bf16")]


def test_functions_that_print_decide_nothing() -> None:
    script = 'say() { echo "$*"; }\nfor each in $LATER; do say $each; done\nrun --bf16'

    assert [command.words for command in follow(script, Path("job.sh")).commands] == [("run", "--bf16")]


def test_variable_decided_by_a_program_is_unknown() -> None:
    [*_, command] = follow("TP=1; rocm-smi && TP=2\nrun --tp $TP", Path("job.sh")).commands

    assert command.words == ("run", "--tp", "$(TP: line 1 decides)")


def test_refusal_names_only_the_condition() -> None:
    with pytest.raises(InputError, match=r"line 1 decides \(\[ -f x \]\) is not told"):
        follow("[ -f x ] && A=--bf16\nsrun train.py $A", Path("job.sh"))


def test_a_script_that_starts_another_names_it(tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text("TP=4 bash $HOME/train_7b.sh\n")

    with pytest.raises(InputError, match=r"it starts train_7b.sh: give that, with the variables"):
        read_arguments(tmp_path / "job.sh")


def test_given_variable_replaces_a_commands_output() -> None:
    [command] = follow("N=$(nproc | tail -1); run $((N * 4))", Path("job.sh"), CommandLine.parse("N=2")).commands

    assert command.words == ("run", "8")


@pytest.mark.parametrize("arguments", ["70b", "SIZE=70b"])
def test_an_argument_that_ends_a_script_with_an_error_is_named(arguments: str) -> None:
    script = "case ${SIZE:-$1} in 7b) TP=1;; 13b|14b) TP=2;; *) echo what; exit 1;; esac; run $TP"
    with pytest.raises(InputError, match="error in line 1 for '70b': give --args with another: 7b or 13b or 14b"):
        follow(script, Path("job.sh"), CommandLine.parse(arguments))


def test_a_script_next_to_it_that_a_script_starts_is_read(tmp_path: Path) -> None:
    (tmp_path / "inner.sh").write_text(
        "run --num-layers ${L:-2} --hidden-size ${H:-8} --lr $1 --bf16 --seq-length $S\n"
    )
    (tmp_path / "job.sh").write_text("export S=16\nL=4\nH=32 bash $HOME/inner.sh 3e-4\n")

    assert read_arguments(tmp_path / "job.sh", CommandLine.parse("--seq-length 64")) == {
        "--num-layers": "2", "--hidden-size": "32", "--lr": "3e-4", "--bf16": True, "--seq-length": "64",
    }  # fmt: skip


def test_an_output_is_asked_for_by_its_variable(tmp_path: Path) -> None:
    (tmp_path / "tools.sh").write_text("f() {\nM=$(machine)\nif [ $M = a ]; then A=--bf16; fi\n}\n")

    with pytest.raises(InputError, match=r"line 3 of tools\.sh decides .* give it with --args 'M=1'; or give a copy"):
        follow("source tools.sh; f; run $A", tmp_path / "job.sh")


def test_braces_of_too_many_words_stay() -> None:
    [command] = follow("run {1..9999}{1..9999} {a,b}{c,d}", Path("job.sh")).commands

    assert command.words == ("run", "{1..9999}{1..9999}", "ac", "ad", "bc", "bd")


def test_scripts_that_start_each_other_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text("bash b.sh\n")
    (tmp_path / "b.sh").write_text("bash a.sh\n")

    with pytest.raises(InputError, match=r"b\.sh has no arguments of a training .* it starts a\.sh"):
        read_arguments(tmp_path / "a.sh")
