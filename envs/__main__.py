"""``python -m envs`` compiles the environments' code ahead; see compilation.py."""

from envs.compilation import compile_all

if __name__ == "__main__":
    compile_all()
