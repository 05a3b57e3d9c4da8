"""rdtplan: compile, inspect and verify weight-transfer plans for vLLM. Importing it costs nothing; torch is not
needed."""

__version__ = "0.1.0"
