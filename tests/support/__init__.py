"""What the tests share: tiny models, references, runs of the same case, an emulator of Metal."""
