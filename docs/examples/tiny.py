"""What the examples stand on: tiny random checkpoints, real vLLM servers on this machine, and their answers.

Nothing here is needed to use rdtexec. A server lives in a session of its own and ends with the example, also when the
example fails, is interrupted or is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests

ROOT = Path(__file__).resolve().parents[2]
TESTBED = ROOT / "tools/cpu_testbed"
PROMPTS = ([1, 2, 3, 4, 5], [100, 200, 250, 17, 23, 42, 7])
START_S = 400
QUIET = {
    "HF_HUB_OFFLINE": "1",  # fetch nothing
    "VLLM_NO_USAGE_STATS": "1",  # report nothing
    "TORCHDYNAMO_DISABLE": "1",  # compile nothing
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise every worker wants a NUMA node of its own
    "TQDM_DISABLE": "1",
}
for setting, value in QUIET.items():
    os.environ.setdefault(setting, value)  # before torch and vLLM are imported, and for every process started here
SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
}
PR_SET_PDEATHSIG = 1


def write_checkpoint(directory: Path, seed: int, *, experts: int = 0, dtype: str = "bfloat16", **save: Any) -> Path:
    """A random Llama, or a Qwen3-MoE with `experts`, and a tokenizer of 512 words (completions want one)."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    if experts:
        moe = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}
        config: Any = transformers.Qwen3MoeConfig(**SIZES, **moe, norm_topk_prob=True, dtype=dtype)
    else:
        config = transformers.LlamaConfig(**SIZES, dtype=dtype)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.to(getattr(torch, dtype)).save_pretrained(directory, **save)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(512)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0").save_pretrained(directory)
    return directory


class Server:
    """A vLLM server with the weight-transfer routes."""

    def __init__(self, checkpoint: Path, *options: str, environment: dict[str, str] | None = None) -> None:
        """Start it and wait until it answers."""
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = checkpoint.parent / f"server-{port}.log"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny", "--seed", "0"]
        command += ["--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "8", "--no-enable-prefix-caching"]
        command += ["--kv-cache-memory-bytes", str(64 << 20), "--weight-transfer-config", '{"backend": "rdtexec"}']
        settings = os.environ | {"VLLM_SERVER_DEV_MODE": "1"} | (environment or {})
        print(f"starting a server on {checkpoint.name} {' '.join(options)} ...", flush=True)
        started = time.monotonic()
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [*command, *options],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=settings,
                cwd=checkpoint.parent,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > started + START_S:
                self.stop()
                raise SystemExit(f"the server did not start:\n{self.tail()}")
            time.sleep(0.25)
        print(f"  ready after {time.monotonic() - started:.0f} s", flush=True)

    def _answers(self) -> bool:
        with contextlib.suppress(requests.RequestException):
            return requests.get(f"{self.url}/health", timeout=2).ok
        return False

    def tail(self) -> str:
        """The end of the server's log."""
        return self.log.read_text()[-4000:]

    def stop(self) -> None:
        """End it with everything that it started, and remove the shared memory that they leave behind."""
        shared = _shared_memory(self._process.pid)
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for path in shared:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def server(checkpoint: Path, *options: str, environment: dict[str, str] | None = None) -> Iterator[Server]:
    """A server that is gone at the end of the block, whatever happens."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    running = Server(checkpoint, *options, environment=environment)
    try:
        yield running
    except BaseException:
        print(f"the end of {running.log}:\n{running.tail()}", file=sys.stderr)
        raise
    finally:
        running.stop()


def _end_with_parent() -> None:
    """In the child, before the server: be terminated when the example is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _shared_memory(session: int) -> set[Path]:
    """Files in /dev/shm that processes of a session have mapped."""
    found: set[Path] = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if os.getsid(int(entry.name)) == session:
                lines = (entry / "maps").read_text().splitlines()
                found |= {Path(line.split(maxsplit=5)[5]) for line in lines if " /dev/shm/" in line}
    return {path for path in found if not path.name.endswith("(deleted)")}


def post(url: str, route: str, **params: str) -> None:
    """One of the server's control routes: `pause` (with mode=wait or keep), `resume`."""
    requests.post(f"{url}/{route}", params=params, timeout=300).raise_for_status()


def answers(url: str, engines: int = 1) -> list[Any]:
    """Greedy tokens for each prompt by each data-parallel engine, with their logprobs, and the best three each time."""
    found = []
    for prompt, engine in itertools.product(PROMPTS, range(engines)):
        body = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
        body |= {"return_token_ids": True, "logprobs": 3}
        headers = {"X-data-parallel-rank": str(engine)} if engines > 1 else {}
        answer = requests.post(f"{url}/v1/completions", json=body, headers=headers, timeout=300)
        answer.raise_for_status()
        choice = answer.json()["choices"][0]
        logprobs = choice["logprobs"]
        found.append([choice["token_ids"], logprobs["token_logprobs"], logprobs["top_logprobs"]])
    return found


def cpu_testbed(directory: Path) -> dict[str, str]:
    """Environment for servers that need `tools/cpu_testbed` (expert parallelism), without installing it."""
    project = tomllib.loads((TESTBED / "pyproject.toml").read_text())["project"]
    info = directory / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    sections = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(sections))
    path = [str(directory), str(TESTBED), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"RDTPLAN_CPU_TESTBED": "1", "PYTHONPATH": os.pathsep.join(path)}


def torchrun(script: str, ranks: int, *arguments: str) -> None:
    """Run `script` as a trainer of `ranks` ranks on this machine; SystemExit when it fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run([*command, script, *arguments], preexec_fn=_end_with_parent, check=False)
    if done.returncode:
        raise SystemExit(f"the trainer failed with exit code {done.returncode}")


def check(what: str, holds: bool) -> None:
    """Say what was looked at; SystemExit (exit code 1) when it does not hold."""
    print(f"  {'ok  ' if holds else 'WRONG'} {what}", flush=True)
    if not holds:
        raise SystemExit(f"wrong: {what}")
