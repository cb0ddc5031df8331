"""`python -m mt_train` is `mt-train`; the launcher starts ranks this way."""

from mt_train.cli import main

if __name__ == "__main__":
    main()
