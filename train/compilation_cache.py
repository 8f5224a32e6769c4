"""Compiled programs kept on the disk, in a folder that only this user can write: a second start compiles nothing."""

import os
from pathlib import Path

# Seconds: what compiles faster costs more to find than to compile.
MIN_COMPILE_SECONDS = 0.2


def private_cache_folder() -> Path | None:
    """Return the folder, made where it is missing: $XDG_CACHE_HOME/smmd_jax/xla, or ~/.cache/smmd_jax/xla.

    Whoever can write there decides what machine code a run executes: the folder is readable and writable by its owner
    alone, and one that belongs to somebody else, or is reached by a link, is not used.

    Returns:
        The folder; None where there is none that can be trusted and written.
    """
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(home) / "smmd_jax" / "xla"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid() or not os.access(folder, os.W_OK | os.X_OK):
            return None
        folder.chmod(0o700)
    except (OSError, RuntimeError):  # RuntimeError: a user without a home
        return None
    return folder


def use_compilation_cache() -> Path | None:
    """Let jax keep and find compiled programs in the private folder, from the next compilation on.

    A choice that was made already is left alone: JAX_COMPILATION_CACHE_DIR names another folder, and
    JAX_ENABLE_COMPILATION_CACHE=false keeps nothing.

    Returns:
        The folder that jax uses; None: nothing is kept.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    if not jax.config.jax_enable_compilation_cache:
        return None
    if jax.config.jax_compilation_cache_dir:
        return Path(jax.config.jax_compilation_cache_dir)
    folder = private_cache_folder()
    if folder is not None:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_SECONDS)
        # A process that compiled before, as a notebook does, has settled that there is no cache.
        compilation_cache.reset_cache()
    return folder
