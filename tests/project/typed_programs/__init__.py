"""Programs as a newcomer writes them: `test_typing` has mypy and pyright check them in strict mode, and runs them."""
