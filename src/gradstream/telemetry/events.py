"""All event records: nodes report only through them, and the progress line, the report and tests read only them."""

from __future__ import annotations
