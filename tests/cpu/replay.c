/* Makes the calls of an image (recorded.py) with a library, and writes their results; without an image, which instruction sets the
 * machine has, as the chooser says.
 *
 *     replay LIBRARY [IMAGE] */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

enum { TABLE = 1 << 16, ENTRY = 64, OUT_BYTES = 1 << 20, MAX_ISAS = 32 };

struct entry {
    char name[48];
    void *numbers[2]; /* of a call: its arguments, the bytes of its result; of a kind: what `struct kind` has */
};

int main(int argc, char **argv) {
    void *library = dlopen(argv[1], RTLD_NOW);
    if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
    if (argc < 3) {
        int32_t (*rank)(int32_t) = (int32_t(*)(int32_t))dlsym(library, "quire_isa_rank");
        for (int32_t isa = 0; isa < MAX_ISAS; isa++)
            if (rank(isa)) printf("%d ", isa);
        return 0;
    }
    int file = open(argv[2], O_RDONLY);
    struct stat about;
    fstat(file, &about);
    int how = MAP_PRIVATE | MAP_FIXED, may = PROT_READ | PROT_WRITE;
    void *out = mmap((void *)0x100000000000, OUT_BYTES, may, how | MAP_ANONYMOUS, -1, 0);
    struct entry *calls = mmap((void *)0x110000000000, (size_t)about.st_size, may, how, file, 0);
    if (out == MAP_FAILED || calls == MAP_FAILED) return perror("mmap"), 1;
    for (struct entry *kind = calls + TABLE / ENTRY; kind->name[0]; kind++) memcpy(kind->numbers, dlsym(library, kind->name), 16);
    int32_t status = 0;
    for (; calls->name[0] && !status; calls++) {
        status = ((int32_t(*)(void *))dlsym(library, calls->name))(calls->numbers[0]);
        fwrite(out, 1, (size_t)calls->numbers[1], stdout);
    }
    if (status) fprintf(stderr, "%s: status %d\n", calls->name, status);
    return status;
}
