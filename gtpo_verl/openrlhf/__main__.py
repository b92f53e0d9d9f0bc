"""What `gtpo-verl openrlhf` becomes."""

from gtpo_verl.openrlhf.command import main

if __name__ == "__main__":
    main()
