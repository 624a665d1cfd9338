"""`gradstream data get` and `gradstream data info`."""

from __future__ import annotations

import inspect

import click


@click.group()
def data() -> None:
    """Shows licence and origin of data sets, and downloads them."""


@data.command()
@click.argument("name")
@click.option("--url", metavar="URL", help="A mirror of the archive; its checksum must be the same.")
def get(name: str, url: str | None) -> None:
    """Downloads a data set into the cache folder, verifies it, and prints its path.

    It continues an interrupted download where that stopped. The cache folder is
    $XDG_CACHE_HOME/gradstream or ~/.cache/gradstream.

    \b
    Examples:
      gradstream data get caltech101
    """
    from gradstream.data.sources import SOURCES, fetch, find
    from gradstream.job.plugins import key_of
    from gradstream.job.registry import class_of

    make = class_of("data set", name)
    source = SOURCES.get(key_of(name))
    if source is not None and source.packed is not None:
        click.echo(find(source) or fetch(source, url=url))
    elif "download" in inspect.signature(make).parameters:
        make(download=True)  # a data set of another package downloads itself
    else:
        click.echo(f"{name}: nothing to download", err=True)


@data.command()
@click.argument("name", required=False)
def info(name: str | None) -> None:
    """Shows licence, citation, page and files of a data set, or of all data sets.

    \b
    Examples:
      gradstream data info caltech101
    """
    from gradstream.job.plugins import key_of
    from gradstream.job.registry import catalogue, class_of

    known = {offer.name: offer.origin for offer in catalogue("data set")}
    if name is not None:
        class_of("data set", name)  # a misspelt name is an error
        known = {key: origin for key, origin in known.items() if key_of(key) == key_of(name)} or {name: ""}
    click.echo("\n\n".join(_text(key, origin) for key, origin in known.items()))


def _text(name: str, origin: str) -> str:
    from gradstream.data.sources import SOURCES, find
    from gradstream.job.plugins import BUILT_IN
    from gradstream.job.registry import class_of

    source = SOURCES.get(name) if origin == BUILT_IN else None
    if source is None:
        about = inspect.getdoc(class_of("data set", name)) or "no description"
        return f"{name}" + (f" ({origin})" if origin else "") + f"\n  {about.splitlines()[0]}"
    lines = [
        name,
        f"  {source.what}",
        f"  licence   {source.licence}",
        f"  cite      {source.citation}",
        f"  page      {source.page}",
    ]
    if source.packed is not None:
        archive = source.packed.archive
        lines += [
            f"  download  {archive.url} ({archive.num_bytes:,} bytes)",
            f"  SHA-256   {archive.sha256}",
            f"  here      {find(source) or f'no: gradstream data get {name}'}",
        ]
    return "\n".join(lines)
