"""A model folder from a hub, through huggingface_hub where it is installed: weights as safetensors, never pickles."""

import re
from pathlib import Path

from smmd_jax.backbones.weights import COMPANIONS
from train.exits import StorageError, UsageError

_FILES = ("*.safetensors", "*.safetensors.index.json", *COMPANIONS)
# Folders inside a repository hold other formats, and consolidated files the same weights a second time.
_NOT_FILES = ("*/*", "consolidated*")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_LOCAL = (
    "Without a hub: put a model folder (config.json, *.safetensors, tokenizer.json) on this machine and name it in "
    "--backbone."
)


def is_hub_name(name: str) -> bool:
    """Say whether a text has the form org/name."""
    return _NAME.fullmatch(name) is not None


def download(name: str) -> Path:
    """Return the local folder of a hub's model, downloading what the cache lacks.

    Raises:
      UsageError: huggingface_hub is not installed, there is no network and no cached copy, or the model is missing or
        gated. One paragraph says which model, whether an access token was found (never the token), what to accept
        where, and the local alternative.
      StorageError: there is no space for it.
    """
    try:
        import huggingface_hub
        from huggingface_hub import constants, errors
    except ImportError as error:
        raise UsageError(
            f"backbone={name} is a name on a hub, and the package huggingface_hub is not installed: pip install "
            f"huggingface_hub. {_LOCAL}"
        ) from error
    try:
        return Path(
            huggingface_hub.snapshot_download(name, allow_patterns=list(_FILES), ignore_patterns=list(_NOT_FILES))
        )
    except errors.GatedRepoError as error:
        reason = (
            f"is gated. Accept its licence on its page, {constants.ENDPOINT}/{name}, with the account whose access "
            "token this machine uses"
        )
        raise UsageError(_paragraph(name, reason, huggingface_hub)) from error
    except errors.RepositoryNotFoundError as error:
        reason = (
            f"was not found on {constants.ENDPOINT}: the name is wrong, or the model is private and the account of the "
            "access token may not see it"
        )
        raise UsageError(_paragraph(name, reason, huggingface_hub)) from error
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", "no status")
        reason = f"could not be fetched: {constants.ENDPOINT} answered with {status}"
        raise UsageError(_paragraph(name, reason, huggingface_hub)) from error
    except errors.HFValidationError as error:
        raise UsageError(f"backbone={name} is no name of a hub's model: {error}. {_LOCAL}") from error
    except OSError as error:
        if error.errno is not None and not isinstance(error, ConnectionError | TimeoutError):
            raise StorageError(f"backbone={name} cannot be stored in the hub's cache: {error}.") from error
        raise UsageError(_paragraph(name, _unreachable(constants), huggingface_hub)) from error
    except Exception as error:
        # The client raises its transport's own errors too, and which transport that is differs between its versions.
        raise UsageError(_paragraph(name, _unreachable(constants), huggingface_hub)) from error


def _unreachable(constants) -> str:
    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} could not be reached"
    return f"is not complete in this machine's cache, and {why}"


def _paragraph(name: str, reason: str, huggingface_hub) -> str:
    seen = (
        "An access token was found on this machine"
        if huggingface_hub.get_token()
        else "No access token was found: set HF_TOKEN, or run `hf auth login`, where the model needs one"
    )
    return f"backbone={name}: the model {reason}. {seen}. {_LOCAL}"
