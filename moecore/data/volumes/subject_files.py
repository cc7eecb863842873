"""Where a subject's files lie below the root of a cohort."""

from pathlib import Path

from moecore.data.volumes.subjects import Subject


def the_one(root: Path, pattern: str, subject: Subject) -> tuple[Path | None, str | None]:
    """The only file of ``subject`` that fits ``pattern``, or None and why there is not one."""
    words = [subject.participant_id]
    if session := subject.session_id:
        words.append(session if session.startswith("ses-") else f"ses-{session}")
    place = pattern.replace("{folder}", "/".join(words)).replace("{prefix}", "_".join(words))
    found = sorted(root.glob(place))
    if len(found) == 1:
        return found[0], None
    if not found:
        return None, f"{root / place}: no such file"
    names = ", ".join(path.name for path in found[:3])
    return None, f"{root / place}: found {len(found)} files ({names}); make the pattern stricter"
