"""Nothing secret reaches the journal, a log, a tracker or the list of processes: what looks like a secret is masked.

Where secrets hide in a training run: credentials in an address (`http://user:password@host`), signed object-store
links, a swarm's invitation, which lets in whoever reads it, and tokens that somebody gave on a command line.
Environment variables are never written anywhere, so they need no mask.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

HIDDEN = "***"
INVITATION = "shoal1"  # how every invitation to a swarm begins
_USERINFO = re.compile(r"(\w[\w+.-]*://)[^/\s'\"]+@")
_NAMES = r"[\w-]*(?:token|secret|password|passwd|signature|credential|api[_-]?key)"
_QUERY = re.compile(rf"([?&;](?:{_NAMES}|sig|key|auth)=)[^&;\s'\"#]+", re.IGNORECASE)
_NAMED = re.compile(rf"((?:^|[\s,{{'\"(.-])(?:{_NAMES})(?:=|:\s*))[^\s,;&'\"}}()]{{6,}}", re.IGNORECASE)
_INVITATION = re.compile(rf"(?<![A-Za-z0-9_-])({INVITATION})[A-Za-z0-9_=-]{{16,}}")
# Tokens that say themselves what they are: Hugging Face, GitHub, several APIs, Slack, JSON web tokens.
_TOKENS = re.compile(r"\b(hf_|gh[pousr]_|github_pat_|sk-|xox[abp]-|eyJ[\w-]{8,}\.eyJ)[\w.-]{16,}")
# Almost every string of a journal has none of these: what is looked for first is cheap.
_SIGNS = (
    "://",
    INVITATION,
    "hf_",
    "gh",
    "sk-",
    "xox",
    "eyj",
    "token",
    "secret",
    "passw",
    "signature",
    "credential",
    "key",
)


def mask(text: str) -> str:
    """The text with every secret in it replaced by `***`."""
    low = text.lower()
    if not any(sign in low for sign in _SIGNS):
        return text
    if "://" in text:
        text = _QUERY.sub(rf"\1{HIDDEN}", _USERINFO.sub(rf"\1{HIDDEN}@", text))
    return _TOKENS.sub(rf"\1{HIDDEN}", _NAMED.sub(rf"\1{HIDDEN}", _INVITATION.sub(rf"\1{HIDDEN}", text)))


def mask_arguments(arguments: list[str]) -> list[str]:
    """A command line, for a record: also the value that follows an option such as `--token`."""
    option = re.compile(rf"--?(?:{_NAMES})", re.IGNORECASE)
    before = ["", *arguments]
    return [HIDDEN if option.fullmatch(last) else mask(a) for last, a in zip(before, arguments, strict=False)]


def hide_argument(secret: str) -> None:
    """Blanks an argument of this process in what `ps` shows to every user of the machine. Linux keeps the command line
    in the process's own memory; elsewhere, and if anything is not as expected, nothing is done."""
    wanted = secret.encode()
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, the 48th and 49th of proc(5)
    except (OSError, ValueError, IndexError):
        return
    if not 0 < start < end or len(wanted) < len(INVITATION):
        return
    at = ctypes.string_at(start, end - start).find(wanted)
    if at >= 0:
        ctypes.memset(start + at, ord("*"), len(wanted))
