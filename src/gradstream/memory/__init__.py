"""Memory of parameters and gradients: flat vectors, loans of their ranges, and shared segments."""

from gradstream.memory.vectors import (
    ALIGNMENT_BYTES,
    Home,
    Loan,
    Loans,
    Memory,
    Span,
    Vector,
    borrow_all,
    trim,
)

__all__ = [
    "ALIGNMENT_BYTES",
    "Home",
    "Loan",
    "Loans",
    "Memory",
    "Span",
    "Vector",
    "borrow_all",
    "trim",
]
