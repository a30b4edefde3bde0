"""What a comparison of index and files found."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class CheckReport:
    """What index and files hold, what does not agree, and what of it was put right."""

    owners: int = 0
    stripes: int = 0
    bytes: int = 0  # of all chunk files
    problems: list[str] = field(default_factory=list)
    fixed: list[str] = field(default_factory=list)
    owner_names: list[str] = field(default_factory=list)
    files_examined: int = 0
    stripes_scanned: int = 0

    @property
    def clean(self) -> bool:
        """Index and files agree (now)."""
        return len(self.problems) == len(self.fixed)
