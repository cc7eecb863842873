"""The versions of what computed something: moecore, torch and packages from outside."""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, packages_distributions, version

SOURCE_TREE = "source tree"  # in the place of the version of what is not installed


def package_versions(outside: Iterable[str]) -> dict[str, str]:
    """Return the versions of moecore, torch and packages from outside, by name."""
    versions = {name: _distribution_version(name) for name in ("moecore", "torch")}
    for name in outside:
        distributions = packages_distributions().get(name, [name])
        versions[name] = _distribution_version(distributions[0])
    return versions


def _distribution_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return SOURCE_TREE
