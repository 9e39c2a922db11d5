"""Whether the installed packages meet the requirements of mlxtune and its main dependencies."""

import importlib.metadata as metadata
from collections.abc import Iterable, Iterator

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from mlxtune.core.machine.facts import MLX_LIBRARIES, Package

_OURS = "mlxtune"
# Their requirements are checked too: with other versions, they fail in obscure ways.
_FOLLOWED = (_OURS, "mlx", "mlx-lm", "transformers")
_FOR_DEVELOPERS = ("test", "interop", "dev")


def packages() -> tuple[Package, ...]:
    """Return the required packages, mlxtune first, then each extra's."""
    version = _installed(_OURS)
    if version is None:
        return ()
    result = [Package(_OURS, "", version, serves=True), *_checked(_followed(_OURS, ""), "")]
    for extra in metadata.metadata(_OURS).get_all("Provides-Extra") or []:
        if extra not in _FOR_DEVELOPERS:
            result += _checked(_followed(_OURS, extra), extra)
    return tuple(result)


def mlx_libraries() -> tuple[str, ...]:
    """Return the installed packages that contain MLX's own library."""
    files = {name: metadata.files(name) or [] for name in MLX_LIBRARIES if _installed(name)}
    return tuple(
        name
        for name, every in files.items()
        if any(str(file).startswith("mlx/lib/libmlx.") for file in every)
    )


def _followed(name: str, extra: str) -> Iterator[Requirement]:
    """Yield the requirements of a package, or of its extra, and their requirements in turn."""
    if _installed(name) is None:
        return
    for required in map(Requirement, metadata.requires(name) or []):
        always, applies = (
            required.marker is None or required.marker.evaluate({"extra": each})
            for each in ("", extra)
        )
        if applies and not (extra and always):
            yield required
            if required.name in _FOLLOWED:
                for each in ("", *sorted(required.extras)):
                    yield from _followed(required.name, each)


def _checked(required: Iterable[Requirement], extra: str) -> Iterator[Package]:
    """Yield each package once, with all requirements of its version together."""
    specifiers: dict[str, SpecifierSet] = {}
    for each in required:
        name = str(canonicalize_name(each.name))
        specifiers[name] = specifiers.get(name, SpecifierSet()) & each.specifier
    for name, specifier in specifiers.items():
        version = _installed(name)
        serves = version is not None and specifier.contains(version, prereleases=True)
        yield Package(name, str(specifier), version, serves, extra)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
