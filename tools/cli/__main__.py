"""`python -m tools.cli` is `infermesh`: how a process of the mesh starts another one with its own interpreter."""

from tools.cli import main

if __name__ == "__main__":
    main(prog_name="infermesh")
