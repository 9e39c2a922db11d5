from mlxtune.cli import main

main()
