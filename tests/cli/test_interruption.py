import subprocess
import sys


def test_ctrl_c_ends_with_one_word_and_its_own_exit_code() -> None:
    program = (
        "import signal, sys; from debubble.cli import app as frame\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "frame.app.command('work')(lambda: signal.raise_signal(signal.SIGINT))\n"
        "sys.argv = ['debubble', 'work']; frame.main()"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "debubble: interrupted.\n")
