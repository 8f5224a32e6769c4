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
# # SMMD on one page
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/smmd-jax/smmd_jax/blob/main/colab/smmd_quickstart.ipynb)
#
# Cross entropy calls "7" for "3" as wrong as "4" for "3". SMMD does not: it compares the predicted distribution over
# the numeric tokens with the true one through a kernel over their values.
#
#     r = softmax(logits of the numbers) - onehot(target)        loss = r' M r
#     K_ij = exp(-(v_i - v_j)^2 / (2 sigma^2))                   M = K + alpha (D - K),   D = diag(row sums of K)
#
# This page builds K and M, shows what a wrong digit costs, takes a few steps with optax, and trains a small model. Any
# runtime will do; a CPU takes minutes.

# %% tags=["parameters"]
REPOSITORY = "https://github.com/smmd-jax/smmd_jax"  # @param {type:"string"}
PLATFORM = ""  # @param ["", "cpu", "gpu", "tpu"]
SIGMA = 2.0  # @param {type:"number"}
STEPS = 100  # @param {type:"integer"}
BATCH_SIZE = 16  # @param {type:"integer"}
EVAL_EXAMPLES = 64  # @param {type:"integer"}
WORKDIR = "runs/quickstart"  # @param {type:"string"}

# %% [markdown]
# ## Install
#
# On Colab this clones the checkout and installs what is missing. JAX and NumPy stay as the runtime has them: replacing
# them would ask for a restart and can lose the accelerator.

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
if PLATFORM and jax.default_backend() != PLATFORM:
    raise RuntimeError(f"PLATFORM is {PLATFORM!r} and jax runs on {jax.default_backend()!r}: choose another runtime.")

# %% [markdown]
# ## The numeric vocabulary and the kernel
#
# Which tokens are numbers is decided once per tokenizer. `numeric_vocab_from_tokenizer` reads a `tokenizer.json`; here
# the ten digits are enough. The report says what was taken and what was left out.

# %%
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax

from smmd_jax import (
    cross_entropy_loss,
    make_numeric_kernel,
    make_numeric_vocab,
    mean_from,
    numeric_mask,
    smmd_loss,
    smmd_terms,
    sum_and_count,
)

digits = jnp.arange(10)
vocab = make_numeric_vocab([*map(str, range(10)), "cat", "007"])
kernel = make_numeric_kernel(vocab, sigma=SIGMA)
print(vocab)
print(f"alpha {float(kernel.alpha):.6f}")

# %%
figure, panels = plt.subplots(1, 2, figsize=(9, 4))
for axes, matrix, title in zip(panels, (kernel.gram, kernel.form), ("K", "M"), strict=True):
    figure.colorbar(axes.imshow(matrix), ax=axes)
    axes.set(title=title, xlabel="digit", ylabel="digit", xticks=range(10), yticks=range(10))

# %% [markdown]
# ## What a wrong digit costs
#
# Each curve is one target; along it a model that is certain of each digit in turn. The MMD part grows with the
# distance. The whole does **not**: for the target 0 the answer 6 costs more than 9, because tokens at the ends have
# fewer neighbours. Cross entropy charges all wrong digits alike.

# %%
certain = 50.0 * jnp.eye(10, 12)  # row i: logits of a model that is certain of digit i; 12 tokens, two of them text
parts = [smmd_terms(certain, jnp.full(10, target), kernel) for target in (0, 3, 5)]
figure, panels = plt.subplots(1, 2, figsize=(9, 4), sharey=True)
for target, part in zip((0, 3, 5), parts, strict=True):
    panels[0].plot(digits, part.mmd, marker="o", label=f"target {target}")
    panels[1].plot(digits, part.total, marker="o", label=f"target {target}")
for axes, title in zip(panels, ("mmd", "smmd = mmd + alpha smoothness"), strict=True):
    axes.set(title=title, xlabel="predicted digit", xticks=range(10))
    axes.legend()

# %% [markdown]
# ## The gradient
#
# At a uniform prediction for the target 3, SMMD raises the logit of 3 and, a little, those of its neighbours, and
# lowers the far ones. Cross entropy raises 3 alone and lowers all others alike. Logits of text get exactly zero from
# SMMD: it needs cross entropy beside it.

# %%
uniform, three = jnp.zeros(12), jnp.array(3)
by_smmd = jax.grad(smmd_loss)(uniform, three, kernel)
by_ce = jax.grad(cross_entropy_loss)(uniform, three)
print("SMMD on the two text tokens:", by_smmd[10:])

figure, axes = plt.subplots(figsize=(6, 3.5))
axes.bar(digits - 0.2, -by_smmd[:10], width=0.4, label="SMMD")
axes.bar(digits + 0.2, -by_ce[:10], width=0.4, label="cross entropy")
axes.set(xlabel="digit", ylabel="- gradient", xticks=range(10))
axes.legend()

# %% [markdown]
# ## In a loop of your own
#
# The kernel goes into the jitted function as an argument. The paper averages over numeric positions only:
# `mean_from(*sum_and_count(loss, numeric_mask(targets, kernel)))`.

# %%
logits = jax.random.normal(jax.random.key(0), (64, 12))
targets = jax.random.randint(jax.random.key(1), (64,), 0, 12)
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))
state = optimizer.init(logits)


@jax.jit
def step(logits, state, targets, kernel):
    def total(logits):
        numeric = mean_from(*sum_and_count(smmd_loss(logits, targets, kernel), numeric_mask(targets, kernel)))
        return cross_entropy_loss(logits, targets).mean() + 3.0 * numeric

    loss, gradient = jax.value_and_grad(total)(logits)
    updates, state = optimizer.update(gradient, state, logits)
    return optax.apply_updates(logits, updates), state, loss


losses = []
for _ in range(30):
    logits, state, loss = step(logits, state, targets, kernel)
    losses.append(float(loss))
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")

# %% [markdown]
# ## Train
#
# The same as `python -m train.main --task=arith --loss=smmd --steps=...` in a terminal: integer arithmetic, a small
# decoder, a run folder with records, plots and a checkpoint. The first time the data are generated, which takes a
# minute. Run the cell again with more steps and it goes on.

# %%
from IPython.display import Image, display

from train.config import parse_command_line
from train.loop import train
from train.main import TABLES

flags = ["--task=arith", "--loss=smmd", f"--sigma={SIGMA}", f"--steps={STEPS}", f"--batch_size={BATCH_SIZE}",
         f"--eval_examples={EVAL_EXAMPLES}", f"--workdir={WORKDIR}"]  # fmt: skip
command_line = ["smmd_quickstart", *flags]
train(parse_command_line(command_line, tables=TABLES), command_line)

# %%
for plot in sorted(Path(WORKDIR, "plots").glob("*.png")):
    display(Image(filename=plot))

# %% [markdown]
# ## Next
#
# `python -m train.compare --task=arith --losses=ce,smmd --seeds=0,1,2` trains both losses with three seeds and writes
# the table. The formulas and the traps are in `docs/losses.md`.
