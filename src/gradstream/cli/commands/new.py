"""`gradstream new`."""

from __future__ import annotations

from pathlib import Path

import click

from gradstream.errors import ConfigError


@click.command()
@click.argument("name")
@click.option("--torch", "kind", flag_value="torch", default="torch", help="A PyTorch module (the default).")
@click.option("--numpy", "kind", flag_value="numpy", help="Three functions on numpy arrays.")
@click.option("--jax", "kind", flag_value="jax", help="Two functions for JAX.")
def new(name: str, kind: str) -> None:
    """Writes a job file NAME.py that runs unchanged: a model, data, an evaluation.

    \b
    Examples:
      gradstream new mine
      gradstream new mine --numpy
    """
    from gradstream.cli.templates import render

    path = Path(name if name.endswith(".py") else f"{name}.py")
    if not path.stem.isidentifier():
        raise ConfigError(
            f"{path.name}: nodes import the file by its name, which must be letters, digits and _"
        )
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(render(kind, path.name))
    except OSError as error:
        raise ConfigError(f"{path} is not written: {error.strerror}") from error
    click.echo(f"{path} is written. Now: gradstream train {path}")
