"""`import shardfield` is cheap: what takes long to import is loaded on first use."""

from __future__ import annotations

import json
import subprocess
import sys

LIMIT = 0.25  # seconds of CPU time beyond torch and torch.distributed.tensor

# The parent imports torch once; each child is a fork that imports shardfield. CPU time, as other tests share the cores.
# The first child writes the bytecode into a folder of its own, as an installed package has it.
SCRIPT = """
import json, os, sys, tempfile, time
import torch, torch.distributed.tensor

def import_in_child():
    read, write = os.pipe()
    child = os.fork()
    if not child:
        before = set(sys.modules)
        start = time.process_time()
        import shardfield
        used = time.process_time() - start
        heavy = [m for m in set(sys.modules) - before if m.split(".")[0] != "shardfield"]
        with os.fdopen(write, "w") as pipe:
            json.dump([used, sorted(heavy)], pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        found = json.load(pipe)
    os.waitpid(child, 0)
    return found

with tempfile.TemporaryDirectory() as folder:
    sys.pycache_prefix, sys.dont_write_bytecode = folder, False
    print(json.dumps([import_in_child() for _ in range(6)]))
"""


def test_import_time():
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300)
    assert not run.returncode, run.stderr
    children = json.loads(run.stdout)
    best = min(used for used, _ in children[1:])
    assert best < LIMIT, f"import shardfield takes {best:.3f} s of CPU time; import what is not needed on first use"
    heavy = {name for _, names in children for name in names if name.count(".") < 3 and name.startswith("torch.")}
    assert not heavy, f"import shardfield loads {sorted(heavy)}"
