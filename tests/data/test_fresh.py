from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, sys

def say(pipe):
    found = {"torch", "transformers", "datasets", "mm_models.data.loader"} & sys.modules.keys()
    pipe.send((sorted(found), len(os.listdir("/proc/self/task"))))

if __name__ == "__main__":
    from mm_models.data.fresh import forkserver

    here, there = forkserver().Pipe()
    process = forkserver().Process(target=say, args=(there,))
    process.start()
    print(*here.recv())
    process.join()
"""


def test_a_process_finds_its_imports_there_and_no_threads(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "['datasets', 'mm_models.data.loader', 'torch', 'transformers'] 1"
    assert not done.stderr
