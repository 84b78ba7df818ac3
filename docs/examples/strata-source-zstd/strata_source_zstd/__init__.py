"""Packs whose experts are compressed with Zstandard, and the source that reads them."""
