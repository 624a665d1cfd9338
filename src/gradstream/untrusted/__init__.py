"""Checks of input from outside the process: text is escaped, documents are bounded and checked.

Other nodes, other machines, strangers on the network and files on a disk may contain anything. The functions
of this package turn input into a checked value or into one typed error, in bounded memory.
"""

from gradstream.untrusted.files import (
    DocumentError,
    open_regular,
    parse_json,
    parse_toml,
    read_regular,
    read_settings,
)
from gradstream.untrusted.schema import MismatchError, check_record, check_value
from gradstream.untrusted.text import (
    LINE_BYTES,
    TEXT_BYTES,
    counted,
    escaped,
    lose_stderr,
    pass_on,
    say,
    show,
    tell,
)

__all__ = [
    "LINE_BYTES",
    "TEXT_BYTES",
    "DocumentError",
    "MismatchError",
    "check_record",
    "check_value",
    "counted",
    "escaped",
    "lose_stderr",
    "open_regular",
    "parse_json",
    "parse_toml",
    "pass_on",
    "read_regular",
    "read_settings",
    "say",
    "show",
    "tell",
]
