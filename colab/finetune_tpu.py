# ---
# jupyter:
#   accelerator: TPU
#   colab:
#     provenance: []
#   jupytext:
#     notebook_metadata_filter: accelerator,colab,language_info
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   language_info:
#     name: python
# ---


# %% [markdown]
# # Fine-tune Qwen2.5 for numbers on one TPU chip or one GPU
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/smmd-jax/smmd_jax/blob/main/colab/finetune_tpu.ipynb)
#
# Takes a Hugging Face checkpoint, fine-tunes it on arithmetic with cross entropy and SMMD, scores it, and writes it
# back as a Hugging Face folder. Choose the runtime "v5e-1 TPU" (or a GPU) before the first cell.
#
# What fits one v5e chip with 16 GiB was asked of the TPU compiler itself, no TPU needed (`docs/scale.md`):
#
#     python -m train.plan --backbone=qwen2.5-0.5b --topology=v5e:1x1 --batch_size=16 --max_length=128
#     python -m train.plan --backbone=qwen2.5-1.5b --topology=v5e:1x1 --batch_size=16 --max_length=128 --lora_rank=16
#
# 8.7 GiB for all parameters of the 0.5B model, 5.8 GiB for adapters beside those of the 1.5B model (jax 0.10.2, libtpu
# 0.0.42.1). No TPU has run it yet.

# %% tags=["parameters"]
REPOSITORY = "https://github.com/smmd-jax/smmd_jax"  # @param {type:"string"}
PLATFORM = "tpu"  # @param ["tpu", "gpu", "cpu"]
WEIGHTS = "Qwen/Qwen2.5-0.5B-Instruct"  # @param {type:"string"}
LORA_RANK = 0  # @param {type:"integer"}
LOSS = "smmd"  # @param ["smmd", "ce", "ntl_was", "ntil", "dist2", "gce"]
STEPS = 300  # @param {type:"integer"}
BATCH_SIZE = 16  # @param {type:"integer"}
MAX_LENGTH = 128  # @param {type:"integer"}
EVAL_EXAMPLES = 500  # @param {type:"integer"}
WORKDIR = "runs/qwen2.5-arith"  # @param {type:"string"}
OUT = "qwen2.5-arith"  # @param {type:"string"}

# %% [markdown]
# `WEIGHTS` is `org/name` of the hub or a folder with `config.json`, `*.safetensors` and `tokenizer.json`, for example
# of a mounted Drive: run `from google.colab import drive; drive.mount("/content/drive")` and give
# `/content/drive/MyDrive/Qwen2.5-0.5B-Instruct`. A `WORKDIR` on the Drive survives the runtime: run all cells again
# and the training goes on where it stopped. For `Qwen/Qwen2.5-1.5B-Instruct` set `LORA_RANK` to 16.
#
# ## Install
#
# The checkout and what is missing; JAX and NumPy stay as the runtime has them. Replacing them would ask for a restart
# and can lose the accelerator.

# %%
import importlib.metadata
import subprocess
import sys
from pathlib import Path

if "google.colab" in sys.modules:
    checkout = Path("smmd_jax_checkout")
    if not checkout.exists():
        subprocess.run(["git", "clone", "--depth=1", REPOSITORY, str(checkout)], check=True)
    pins = [f"{package}=={importlib.metadata.version(package)}" for package in ("jax", "jaxlib", "numpy")]
    Path("constraints.txt").write_text("\n".join(pins))
    # Again each time: quick where all is there, and an installation that broke off is finished.
    pip = [sys.executable, "-m", "pip", "install", "-q", "-c", "constraints.txt", f"./{checkout}[train]"]
    if subprocess.run(pip).returncode:
        raise RuntimeError(f"pip failed beside {pins[0]} (above): run this cell again, or take a newer runtime.")
    sys.path.insert(0, str(checkout))

# %%
import jax

print(f"jax {jax.__version__} on {jax.default_backend()}: {jax.devices()}")
if jax.default_backend() != PLATFORM:
    raise RuntimeError(f"PLATFORM is {PLATFORM!r} and jax runs on {jax.default_backend()!r}: choose another runtime.")

# %% [markdown]
# ## On a TPU
#
# Products in bfloat16, sums and the master parameters in float32. The layers run as one loop, which compiles in a
# minute, and are computed again on the way back, which saves the memory that the batch needs.

# %%
flags = []
if PLATFORM == "tpu":
    flags = ["--dtype=bfloat16", "--scan_layers", "--remat=full"]

# %% [markdown]
# ## On a GPU
#
# The same with the products kept, where the memory allows: an L4 or A100 has bfloat16 units, and 22 GiB or more. A T4
# has neither: its products are in float32, layers are computed again, and `LORA_RANK` 16 saves the optimizer's memory.

# %%
if PLATFORM == "gpu":
    is_t4 = "T4" in jax.devices()[0].device_kind
    flags = ["--scan_layers", "--remat=full"] if is_t4 else ["--dtype=bfloat16", "--scan_layers", "--remat=dots"]

# %% [markdown]
# ## Train
#
# What `python -m train.main` does in a terminal. The weights are read tensor by tensor onto the device; the model is
# scored before its first step too, which is what it is compared with.

# %%
from train.config import parse_command_line
from train.loop import train
from train.main import TABLES

flags += ["--task=arith", f"--backbone={WEIGHTS}", f"--platform={PLATFORM}", f"--loss={LOSS}", f"--steps={STEPS}",
          f"--lora_rank={LORA_RANK}", f"--batch_size={BATCH_SIZE}", f"--max_length={MAX_LENGTH}",
          f"--eval_examples={EVAL_EXAMPLES}", f"--workdir={WORKDIR}"]  # fmt: skip
command_line = ["finetune_tpu", *flags]
train(parse_command_line(command_line, tables=TABLES), command_line)

# %% [markdown]
# ## Plots

# %%
from IPython.display import Image, display

for plot in sorted(Path(WORKDIR, "plots").glob("*.png")):
    display(Image(filename=plot))

# %% [markdown]
# ## Evaluate
#
# On a split that training never saw, of longer expressions; `--decode` and `--task` choose more, see `docs/tasks.md`.

# %%
from train.evaluation import EvaluateFlags, evaluate
from train.report import evaluation_table

_, summary = evaluate(EvaluateFlags(workdir=WORKDIR, split="longer", eval_examples=EVAL_EXAMPLES))
print(evaluation_table(summary))

# %% [markdown]
# ## Export
#
# A folder that transformers, vLLM and this library load, with the names and the tokenizer of the source; adapters are
# merged. `verify` loads it again and compares its logits with the run's before the folder takes its name.

# %%
from train.hf_folder import export

_, agreement = export(WORKDIR, OUT, verify=True)
print(f"verified: {agreement}")
print(sorted(path.name for path in Path(OUT).iterdir()))

# %% [markdown]
# ## Next
#
# `huggingface-cli upload NAME` followed by the folder puts it on the hub. More chips: add `--mesh=fsdp:8` and see
# `docs/scale.md`. The other losses: `LOSS`, or `python -m train.compare` for several with seeds.
