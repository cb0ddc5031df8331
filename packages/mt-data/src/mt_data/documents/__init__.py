"""Texts: files of them, read as documents and divided into parts."""
