// AMX instructions on a CPU that has none.
#pragma once

// From here on, an AMX instruction that raises SIGILL is read from the program, checked and carried out in
// plain code, as the manual describes it (Intel 64 and IA-32 Architectures Software Developer's Manual,
// volume 2), and the program goes on behind it. So what is tested is the code that the compiler made.
// Whatever the CPU would not accept ends the process with a message.
void trap_tile_instructions();
