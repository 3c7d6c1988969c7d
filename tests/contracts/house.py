"""The house in numbers: `python tests/contracts/house.py [ROOT]` prints them for the sources below ROOT (daemon/holter)."""

import ast
import sys
from collections import Counter
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[2] / "daemon" / "holter"


class House:
    """The modules of a package, read once."""

    def __init__(self, root: Path = SOURCES) -> None:
        self.root = root
        self.texts = {path: path.read_text(encoding="utf-8") for path in sorted(root.rglob("*.py"))}
        self.trees = {path: ast.parse(text) for path, text in self.texts.items()}
        self.modules = {self._name(path): path for path in self.texts}

    def importers(self) -> dict[str, set[str]]:
        """Module -> modules that import it or something of it; packages' own `__init__` files are left out on the left."""
        found: dict[str, set[str]] = {name: set() for name, path in self.modules.items() if path.name != "__init__.py"}
        for name, path in self.modules.items():
            for target in self._imported(self.trees[path]):
                if target in found and target != name:
                    found[target].add(name)
        return found

    def doubled_classes(self) -> dict[str, list[str]]:
        """Public class name -> the modules that define it, where there are several."""
        return {name: places for name, places in self.classes().items() if len(places) > 1}

    def classes(self) -> dict[str, list[str]]:
        """Public class name -> the modules that define it."""
        defined: dict[str, list[str]] = {}
        for name, path in self.modules.items():
            for node in ast.walk(self.trees[path]):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    defined.setdefault(node.name, []).append(name)
        return defined

    def files_of_folders(self) -> dict[str, int]:
        """Folder -> files in it, `__init__.py` aside."""
        counts = Counter(path.parent for path in self.texts if path.name != "__init__.py")
        return {str(folder.relative_to(self.root.parent)): number for folder, number in counts.items()}

    def num_lines(self) -> int:
        """Of source, blank lines and docstrings too."""
        return sum(text.count("\n") for text in self.texts.values())

    def _name(self, path: Path) -> str:
        parts = path.relative_to(self.root.parent).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @staticmethod
    def _imported(tree: ast.Module) -> set[str]:
        names: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        return names


def main(root: Path) -> None:
    """Print the numbers."""
    house = House(root)
    importers = house.importers()
    print(f"modules                     {len(house.modules)}")
    print(f"modules with one importer   {sum(len(found) == 1 for found in importers.values())}")
    print(f"class names in two places   {len(house.doubled_classes())}")
    print(f"files in the fullest folder {max(house.files_of_folders().values())}")
    print(f"source lines                {house.num_lines()}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCES)
