from simulation.cli import main

main()
