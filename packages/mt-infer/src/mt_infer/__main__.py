"""`python -m mt_infer` is `mt-infer`; the launcher starts ranks this way."""

from mt_infer.cli import main

if __name__ == "__main__":
    main()
