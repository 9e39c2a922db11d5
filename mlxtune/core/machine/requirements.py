"""Whether what is installed is what is required: by this package, and by those that it rests on."""

from __future__ import annotations

import importlib.metadata as metadata
from collections.abc import Iterable, Iterator

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from mlxtune.core.machine.facts import MLX_LIBRARIES, Package

_OURS = "mlxtune"
# Whose requirements count too: with other versions they fail in ways that do not say so.
_FOLLOWED = (_OURS, "mlx", "mlx-lm", "transformers")
_FOR_DEVELOPERS = ("test", "dev")
_LIBRARY = "mlx/lib/libmlx."


def packages() -> tuple[Package, ...]:
    """Return what has to be installed, ourselves first, then what each extra asks for."""
    ours = _installed(_OURS)
    if ours is None:
        return ()
    found = [Package(_OURS, "", ours, serves=True)]
    found += _judged(_followed(_OURS, ""), "")
    for extra in metadata.metadata(_OURS).get_all("Provides-Extra") or []:
        if extra not in _FOR_DEVELOPERS:
            found += _judged(_followed(_OURS, extra), extra)
    return tuple(found)


def mlx_libraries() -> tuple[str, ...]:
    """Return the packages that have put MLX's library in place."""
    return tuple(name for name in MLX_LIBRARIES if _brings_library(name))


def _brings_library(name: str) -> bool:
    try:
        files = metadata.files(name) or []
    except metadata.PackageNotFoundError:
        return False
    return any(str(file).startswith(_LIBRARY) for file in files)


def _followed(name: str, extra: str) -> Iterator[Requirement]:
    """Yield what a package requires for an extra, or at any rate; also what that rests on."""
    for required in _required(name, extra):
        yield required
        if required.name in _FOLLOWED:
            for each in ("", *sorted(required.extras)):
                yield from _followed(required.name, each)


def _required(name: str, extra: str) -> Iterator[Requirement]:
    try:
        lines = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return
    for line in lines:
        try:
            required = Requirement(line)
        except InvalidRequirement:
            continue
        marker = required.marker
        always = marker is None or marker.evaluate({"extra": ""})
        asked = marker is None or marker.evaluate({"extra": extra})
        if asked and (not extra or not always):
            yield required


def _judged(required: Iterable[Requirement], extra: str) -> Iterator[Package]:
    """Yield each package once, with all that is asked of its version."""
    asked: dict[str, SpecifierSet] = {}
    for each in required:
        name = str(canonicalize_name(each.name))
        asked[name] = asked.get(name, SpecifierSet()) & each.specifier
    for name, specifier in asked.items():
        version = _installed(name)
        serves = version is not None and specifier.contains(version, prereleases=True)
        yield Package(name, str(specifier), version, serves, extra)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
