"""The program that a process of `gtpo-verl openrlhf` turns into."""

from gtpo_verl.openrlhf.command import main

if __name__ == "__main__":
    main()
