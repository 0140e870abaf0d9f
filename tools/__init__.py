"""What people run: the `infermesh` command line, the installer behind `tools/up` and `tools/test`, the benchmark."""
