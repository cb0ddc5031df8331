"""A progress line on a terminal."""

from mt_files import Progress as Progress
