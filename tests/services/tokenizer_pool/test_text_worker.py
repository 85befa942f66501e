import os
import sys
from pathlib import Path
from subprocess import run

import blockyard
from blockyard.services.launcher.models.model_files import demo_folder

SOURCE = str(Path(blockyard.__file__).parents[1])

# in a process of its own: threads of tokenizers cannot be ended
ENCODE = """
import os, sys
from pathlib import Path
from blockyard.services.tokenizer_pool import text_worker
from blockyard.shared import tokenizer_files

os.environ[text_worker.PARALLELISM] = "false"
tokenizer = tokenizer_files.load(sys.argv[1]).tokenizer
texts = [f"text number {i} of those that are encoded " * 20 for i in range(64)]
alone = [one.ids for one in tokenizer.encode_batch_fast(texts)]
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
text_worker.use_threads(int(sys.argv[2]))
assert [one.ids for one in tokenizer.encode_batch_fast(texts)] == alone
print(len(list(Path("/proc/self/task").iterdir())), flush=True)
os._exit(0)
"""


def num_threads(cores: int) -> int:
    """Threads of a forked process that has encoded many texts on a machine with so many cores."""
    command = [sys.executable, "-P", "-c", ENCODE, str(demo_folder()), str(cores)]
    done = run(command, capture_output=True, text=True, timeout=60, env=os.environ | {"PYTHONPATH": SOURCE}, check=True)
    return int(done.stdout)


def test_texts_of_a_job_are_encoded_by_threads_where_there_are_cores() -> None:
    assert num_threads(4) == 1
    assert num_threads(8) == 3
