"""Packages outside of the core, which does not know them: `cli` and users import them, other packages do not.

An engine is reached by its name in `ENGINES` of `gradstream._train`; `gs.replay` is imported when it is asked for.
"""
