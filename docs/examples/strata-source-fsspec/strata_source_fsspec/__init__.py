"""Packs whose experts lie wherever fsspec can read, and the source that reads them."""
